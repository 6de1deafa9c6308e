"""The README's first example runs as it is written."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_first_example_runs_and_says_what_is_claimed(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    names = {}
    exec(compile(code, str(README), "exec"), names)
    assert names["y"].shape == (8, 128, 768)
    assert "path" in capsys.readouterr().out
    fused = {n for n, m in names["model"].named_modules() if "Fused" in type(m).__name__}
    assert {name.removesuffix(".") for name in fused} == {"layers.0", "layers.1"}
    assert '["layers.0", "layers.1"]' in code
