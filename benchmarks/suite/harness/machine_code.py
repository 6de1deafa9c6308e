"""Facts read from a kernel's machine code: NVIDIA's by the tools inside the triton package, AMD's
from the assembler's text.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

READER = 3  # raise when the same machine code would be read differently: it keys the cache

# The first pattern that matches the opcode decides. NVIDIA: CUDA binary utilities, "Instruction
# set reference".
_CLASSES = (
    ("tensor", r"H?[GHIQBDOU]*(HMMA|GMMA|IMMA|DMMA|QMMA|OMMA|UTC\w*MMA)|v_s?mfma"),
    ("control", r"LDGDEPBAR"),
    ("local", r"LDL|STL|scratch_"),
    ("shared", r"LDS|STS|LDSM|STSM|ATOMS|MOVM|ds_"),
    ("tensor_memory", r"LDTM|STTM|UTCCP|UTCBAR|UTCATOM"),
    ("global", r"LDG|STG|LD$|ST$|RED|ATOM|UTMA|UBLK|CCTL|global_|buffer_|flat_"),
    ("special", r"MUFU|v_(exp|log|rcp|rsq|sqrt|sin|cos)_"),
    (
        "control",
        r"BRA|BRX|EXIT|RET|CALL|BAR|WARPSYNC|BSSY|BSYNC|DEPBAR|LDGDEPBAR|SYNCS|NANOSLEEP|NOP|YIELD|ELECT|VOTE"
        r"|WARPGROUP|MEMBAR|FENCE|ERRBAR|JMP|KILL|BPT|BMOV|UCGABAR|ACQ|PREEXIT"
        r"|s_(c?branch|barrier|endpgm|wait|nop|sleep|setprio|sched|cbranch)",
    ),
    ("convert", r"F2F|F2I|I2F|F2FP|I2I|FRND|v_cvt"),
    (
        "float",
        r"F(ADD|MUL|FMA|SETP|SEL|MNMX|CHK|SET|SWZADD)|H(ADD|MUL|FMA|MNMX|SET)|D(ADD|MUL|FMA|SETP)"
        r"|v_\w*f(16|32|64)|v_pk_\w*f",
    ),
    (
        "move",
        r"U?MOV|R2UR|UR2R|S2R|S2UR|CS2R|SHFL|R2P|P2R|PLOP|UPLOP|REDUX|LDC|ULDC|LDCU|VOTEU"
        r"|v_mov|s_mov|v_accvgpr|v_(read|write)|s_load",
    ),
)
_CLASSES_RE = [(name, re.compile(pattern)) for name, pattern in _CLASSES]
CLASSES = tuple(dict.fromkeys((*(name for name, _ in _CLASSES), "integer")))


def classify(opcode: str) -> str:
    """The class of one opcode; what is none of the others is integer arithmetic and logic.

    >>> [classify(opcode) for opcode in ("HGMMA", "LDGSTS", "STL", "IMAD", "ds_read_b128")]
    ['tensor', 'global', 'local', 'integer', 'shared']
    """
    for name, pattern in _CLASSES_RE:
        if pattern.match(opcode):
            return name
    return "integer"


def _classes(opcodes: Iterable[str]) -> dict[str, int]:
    counts = dict.fromkeys(CLASSES, 0)
    for opcode in opcodes:
        counts[classify(opcode)] += 1
    return counts


def _tool(name: str) -> str:
    """NVIDIA's binary utilities, inside the triton package."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise RuntimeError(f"{name} is missing from the triton package ({path.parent})")
    return str(path)


_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<text>[^;]+?)\s*;", re.MULTILINE)
_OPCODE = re.compile(r"^(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9]*)")


def read_cubin(cubin: bytes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)

        def run(*command: str) -> str:
            return subprocess.run(
                [*command, str(file)], capture_output=True, text=True, check=True
            ).stdout

        usage = run(_tool("cuobjdump"), "-res-usage")
        text = run(_tool("nvdisasm"), "-c")
    sass = [match["text"] for match in _SASS.finditer(text)]
    # The assembler pads with a branch to itself and NOPs up to a multiple of 128 bytes: not the
    # kernel's doing.
    while sass and sass[-1].startswith(("NOP", "BRA")):
        sass.pop()
    opcodes = [m["opcode"] for line in sass if (m := _OPCODE.match(line))]
    classes = _classes(opcodes)
    used = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    return {
        "registers": used["REG"],
        # A stack without loads or stores is a frame never used; with them it is a spill, however
        # it is reached.
        "spills": classes["local"],
        "static_shared": used.get("SHARED", 0),
        "instructions": len(opcodes),
        "instruction_classes": classes,
        "sass_sha256": hashlib.sha256("\n".join(sass).encode()).hexdigest(),
    }


_AMD = re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)(.*?)(?:\s*;.*)?$", re.MULTILINE)


def read_amdgcn(text: str) -> dict[str, Any]:
    found = list(_AMD.finditer(text))
    classes = _classes(match[1] for match in found)

    def field(name: str) -> int:
        match = re.search(rf"^\s+(?:-\s+)?\.{name}:\s+(\d+)", text, re.MULTILINE)
        return int(match[1]) if match else 0

    return {
        "registers": field("vgpr_count"),
        # A scalar register that waits in a lane of a vector register does not go to memory.
        "spills": max(field("vgpr_spill_count"), classes["local"]),
        "static_shared": field("group_segment_fixed_size"),
        "instructions": len(found),
        "instruction_classes": classes,
        "sass_sha256": hashlib.sha256(
            "\n".join(f"{m[1]} {m[2].strip()}" for m in found).encode()
        ).hexdigest(),
    }
