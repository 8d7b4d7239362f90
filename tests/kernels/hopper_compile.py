"""Compile kernels for a Hopper GPU where there is none, and report what ptxas made of them.

Run as a program: a list of jobs as JSON on stdin, a list of reports as JSON on stdout. It is a process of its own
because the tests run under Triton's interpreter, whose kernels cannot be compiled.

A job is {"kernel": "module:name", "arguments": {name: type or constant}, "warps": n, "options": {...}}: the string
"*bf16" or "i64" is a run-time argument (pointers and integers taken as divisible by 16, but those that the kernel does
not specialize on and those named in "odd"), {"dtype": "bf16"} a constant that is a dtype of Triton, anything else a
constant.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(nvidia.__path__[0] if hasattr(nvidia, "__path__") else nvidia.__file__) / "bin" / "cuobjdump"


def report(job: dict[str, Any]) -> dict[str, Any]:
    module, name = job["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    signature, constants, attributes = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        value = job["arguments"][argument]
        if isinstance(value, str):
            signature[argument] = value
            odd = kernel.params[index].do_not_specialize or argument in job.get("odd", ())
            if not (odd or value.startswith("fp")):
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "constexpr"
            constants[(index,)] = triton.language.dtype(value["dtype"]) if isinstance(value, dict) else value
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": job["warps"], **job.get("options", {})}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    accesses = re.findall(r"\b(ld|st)\.global[\w:.]*?(v[248]\.)?[bfu](\d+)\b", compiled.asm["ptx"])
    return {
        "registers": found["REG"],
        "stack": found["STACK"] + found["LOCAL"],
        "shared": compiled.metadata.shared,
        "accesses": Counter(f"{kind}.{vector}b{width}" for kind, vector, width in accesses),
        "ptx": compiled.asm["ptx"] if job.get("ptx") else "",
    }


if __name__ == "__main__":
    json.dump([report(job) for job in json.load(sys.stdin)], sys.stdout)
