"""Plain memory, for a kernel gets an address: what may be given to one, and what torch is told of what it wrote."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

ADVICE = {
    "DTensor": "give its local part, x.to_local()",
    "AsyncCollectiveTensor": "wait for it, x.wait()",
    "MaskedTensor": "give its values, x.get_data()",
    "FakeTensor": "a fake tensor has no values: call this outside of FakeTensorMode, or in torch.compile",
}
"""By the name of the type: importing these types is not free."""


def check_plain(what: object, x: Tensor, name: str = "") -> None:
    """Refuse tensors without memory of their own, or whose memory is not their values in rows.

    `what` is who asks (a name, or a codec, written out only when something is wrong) and `name` what x is to it.
    """
    if not (x.is_cpu or x.is_cuda):
        raise NotImplementedError(
            f"{what}: got a tensor on {x.device}; kernels run on CPUs and CUDA devices, so move it to one"
        )
    try:
        # an address alone tells most: wrappers have none, or an error in its place; memory that was freed begins at 0
        if (x.data_ptr() != x.storage_offset() * x.itemsize or not x.numel()) and not x.is_nested:
            return
    except RuntimeError:
        pass
    got = f"{name} is" if name else "got"
    raise TypeError(f"{what}: {got} {_described(x)}, which is not plain memory; {_advice(x)}")


def _described(x: Tensor) -> str:
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "a tensor inside a transform of torch.func"
    if x.layout is not torch.strided or x.is_nested:
        return f"a {'nested ' if x.is_nested else ''}tensor of layout {x.layout}"
    return f"a {type(x).__name__}" if type(x) is not Tensor else "a tensor without storage"


def _advice(x: Tensor) -> str:
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "call this outside of vmap, grad and functionalize"
    if x.is_nested:
        return "give the plain tensor inside, x.values(), or its parts, x.unbind()"
    if x.layout is not torch.strided:
        return "give a dense tensor, x.to_dense()"
    return ADVICE.get(type(x).__name__, "give the plain tensor that holds its values")


def check_written(what: object, written: Mapping[str, Tensor | None], read: Mapping[str, Tensor | None]) -> None:
    """Refuse to write where autograd would not see it, or where something else lies: a kernel reads while it writes.

    Both by the names that an error shall say. What is read and not contiguous is copied before.
    """
    apart = {name: x for name, x in read.items() if x is not None and x.is_contiguous()}
    for name, out in written.items():
        if out is None:
            continue
        _check_no_grad(what, name, out)
        if shares_places(out):
            raise ValueError(f"{what}: {name} has elements that share their memory; {_copy(out)}")
        for other, x in apart.items():
            check_apart(what, name, out, other, x)
        apart[name] = out


def check_apart(what: object, name: str, out: Tensor, other: str, x: Tensor) -> None:
    if overlap(out, x):
        raise ValueError(f"{what}: {name} overlaps {other} in memory; give {name} memory of its own")


def _check_no_grad(what: object, name: str, out: Tensor) -> None:
    """As torch does for `out=`."""
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{what}: {name} requires grad, and writing into it has no derivative; call this under torch.no_grad(), "
            f"or give {name}.detach()"
        )


def _copy(x: Tensor) -> str:
    return f"got shape {list(x.shape)} with strides {list(x.stride())}, so give a copy (clone, contiguous)"


def wrote(*tensors: Tensor | None) -> None:
    """Tell autograd that these were changed, so that a backward that saved them raises instead of using them."""
    given = [x for x in tensors if x is not None]
    if given:
        increment_version(given)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the stretches of memory from the first to the last element of each have a byte in common."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    (a_begin, a_end), (b_begin, b_end) = _stretch(a), _stretch(b)
    return a_begin < b_end and b_begin < a_end


def _stretch(x: Tensor) -> tuple[int, int]:
    begin = x.data_ptr()
    if x.is_contiguous():
        return begin, begin + x.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (reach + 1) * x.itemsize


def shares_places(tensor: Tensor) -> bool:
    """Whether two elements lie at one address."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 1
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    for stride, size in dims:
        if stride < reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    return stride == 0 or _places(tensor).unique().numel() < tensor.numel()


def _places(tensor: Tensor) -> Tensor:
    """The address of every element, counted in elements: for strides that interleave."""
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return places
