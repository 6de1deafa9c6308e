"""Side records: one JSON line each, appended to the file that FUSED_MLP_NOTES names."""

from __future__ import annotations

import json
import os
from typing import Any

VARIABLE = "FUSED_MLP_NOTES"


def note(kind: str, **fields: Any) -> None:
    """Append a record where a result file has no column for it; without the variable, nothing."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, **fields}) + "\n")
