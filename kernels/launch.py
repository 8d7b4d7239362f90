"""A kernel launch as a value: it can be run on a GPU, or compiled for one on a machine that has none.

What the compiler says about a kernel (registers, spills, shared memory, the matrix instructions it chose) answers
most tuning questions and needs no device. Keeping the launch as data means that the very configuration that runs is
the one that is inspected.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TRITON_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Resources:
    """What the compiler made of a kernel, read from the machine code.

    `registers` per thread, `shared` bytes a program, `spills` the number of local-memory loads and stores in the
    code (zero when everything lives in registers), `opcodes` how often each SASS instruction stem stands in it.
    """

    registers: int
    shared: int
    spills: int
    opcodes: Mapping[str, int]

    @property
    def warpgroup_products(self) -> int:
        """Hopper's warpgroup matrix instructions in the code; zero means that the slower path was taken."""
        return self.opcodes.get("HGMMA", 0)


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its grid, its arguments by name (constants included), and the compiler's options."""

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    num_warps: int
    num_stages: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Launch on the current stream of the current device (or run in the interpreter)."""
        self.kernel[self.grid](**self.args, num_warps=self.num_warps, num_stages=self.num_stages, **self.options)

    def compile(self, capability: int = 90) -> Resources:
        """Compile for a compute capability (90 is Hopper) and read the resource use; no GPU is needed."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.args[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif hasattr(value, "block_shape"):  # a descriptor, Triton's or Gluon's, which has a layout too
                shape = ",".join(str(n) for n in value.block_shape)
                layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
                signature[parameter.name] = f"tensordesc<{_TRITON_NAMES[value.base.dtype]}[{shape}]{layout}>"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{_TRITON_NAMES[value.dtype]}"
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            elif value == 1:
                signature[parameter.name], constants[parameter.name] = "constexpr", 1
            else:
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        source = self._source(signature, constants, attributes)
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": self.num_warps, "num_stages": self.num_stages, **self.options},
        )
        return _read_resources(compiled.asm["cubin"], compiled.metadata.shared)

    def _source(self, signature: Any, constants: Any, attributes: Any) -> Any:
        from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

        kind = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
        return kind(self.kernel, signature, constants, attributes)


def _tool(name: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not tool.exists():
        raise FileNotFoundError(f"{tool}: this installation of Triton carries no {name}; install Triton's own wheel")
    return str(tool)


def _read_resources(cubin: bytes, shared: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [_tool("cuobjdump"), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
        sass = subprocess.run(
            [_tool("cuobjdump"), "--dump-sass", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers = re.search(r"\bREG:(\d+)", usage)
    if registers is None:
        raise RuntimeError(f"cuobjdump printed no register count: {usage!r}")
    opcodes: dict[str, int] = {}
    for match in re.finditer(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", sass, re.MULTILINE):
        opcodes[match.group(1)] = opcodes.get(match.group(1), 0) + 1
    return Resources(
        registers=int(registers.group(1)),
        shared=shared,
        spills=opcodes.get("LDL", 0) + opcodes.get("STL", 0),
        opcodes=opcodes,
    )
