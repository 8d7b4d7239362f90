"""The bulk reduction into global memory, which Gluon's compiler has and its language does not offer.

`cp.reduce.async.bulk.tensor` (PTX ISA, "Data Movement and Conversion Instructions") adds a tile of shared memory to
global memory in the L2: one thread issues it, whole lines travel, and nobody waits but for the tile to have been read.
Triton 3.6 and 3.7 make it from `tl.make_tensor_descriptor(...).atomic_add`, through this operation.
"""

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin


@builtin
def async_reduce_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Adds the tile in shared memory `src` to `tensor_desc` at `coord`, like `tma.async_copy_shared_to_global`.

    The order of adds from several programs is not fixed. `tma.store_wait` says when `src` has been read.
    """
    where = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, where, src.handle)
