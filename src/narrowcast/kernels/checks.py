"""What a kernel may be called with, since it gets plain numbers and addresses; and what torch hears of what it wrote.

Ops and codecs check with these, once, before anything runs. `what` is who asks: a name, or a codec, which is written
out only when something is wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

ADVICE = {
    "DTensor": "give its local part, x.to_local()",
    "AsyncCollectiveTensor": "wait for it, x.wait()",
    "MaskedTensor": "give its values, x.get_data()",
    "FakeTensor": "a fake tensor has no values: call this outside of FakeTensorMode, or in torch.compile",
}
"""By the name of the type: importing these types is not free."""


def check_same_device(what: object, name: str, tensor: Tensor | None, like: Tensor) -> None:
    if tensor is not None and tensor.device != like.device:
        raise ValueError(
            f"{what}: {name} is on {tensor.device} and the values on {like.device}; put both on one device"
        )


def check_floats(what: object, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: got {type(x).__name__}; give a torch tensor, for example torch.as_tensor(x)")
    if x.dtype not in FLOATS:
        raise TypeError(f"{what}: got {x.dtype}; give float32, float16 or bfloat16, for example x.float()")
    check_plain(what, x)


def check_integer(what: object, rule: str, number: int) -> int:
    """`number` as a plain int, which is all that C takes; numpy and torch have integers of their own."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{what}: {rule}, got {number!r}") from None


def check_seed(what: object, seed: int) -> int:
    rule = "seed and stream are 64-bit unsigned integers"
    seed = check_integer(what, rule, seed)
    if not 0 <= seed < 2**64:
        raise ValueError(f"{what}: {rule}, got {seed}")
    return seed


def check_count(what: object, n: int) -> int:
    if (type(n) is int and n >= 0) or isinstance(n, torch.SymInt):
        return n  # as it is, with a size that a compiler does not know yet
    rule = "n is a number of values, an integer that is not negative"
    n = check_integer(what, rule, n)
    if n < 0:
        raise ValueError(f"{what}: {rule}, got {n}")
    return n


def check_plain(what: object, x: Tensor, name: str = "") -> None:
    """Refuse tensors without memory of their own, or whose memory is not their values in rows.

    `name` is what x is to whoever asks.
    """
    if not (x.is_cpu or x.is_cuda):
        raise NotImplementedError(
            f"{what}: got a tensor on {x.device}; kernels run on CPUs and CUDA devices, so move it to one"
        )
    try:
        # an address alone shows most: wrappers have none, or an error in its place; memory that was freed begins at 0
        if (x.data_ptr() != x.storage_offset() * x.itemsize or not x.numel()) and not x.is_nested:
            return
    except RuntimeError:
        pass
    got = f"{name} is" if name else "got"
    raise TypeError(f"{what}: {got} {_description(x)}, which is not plain memory; {_advice(x)}")


def _description(x: Tensor) -> str:
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


def mark_written(*tensors: Tensor | None) -> None:
    """Tell autograd that these were changed, so that a backward that saved them raises instead of using them."""
    for x in tensors:
        if x is not None:
            increment_version(x)


Stretch = tuple[int, int]
"""Where memory begins and ends."""


def stands_alone(x: Tensor, n: int, dtype: torch.dtype, device: torch.device, taken: list[Stretch]) -> bool:
    """Whether x is n values of a type in contiguous memory on a CPU or CUDA device, apart from all that is `taken`, to
    which it is added: whatever may be written passes every check then. False says nothing; the checks look closer.
    """
    try:
        is_such = type(x) is Tensor and x.dtype is dtype and x.numel() == n and x.device == device
        if not is_such or x.layout is not torch.strided or x.is_nested or not x.is_contiguous():
            return False
        begin = x.data_ptr()
        # as in `check_plain`
        if begin == x.storage_offset() * x.itemsize or x.requires_grad or x.is_neg():
            return False
    except RuntimeError:
        return False
    return _is_free(begin, begin + x.nbytes, taken)


def _is_free(begin: int, end: int, taken: list[Stretch]) -> bool:
    for other_begin, other_end in taken:
        if begin < other_end and other_begin < end:
            return False
    taken.append((begin, end))
    return True


def are_plain_rows(rows: Tensor, nbytes: int, taken: list[Stretch]) -> bool:
    """Whether rows are wires of so many bytes, each contiguous, and their stretch of memory lies apart from all that is
    `taken`, to which it is added. They may lie upon each other.
    """
    try:
        if rows.dtype is not torch.uint8 or rows.layout is not torch.strided or rows.is_nested or rows.dim() != 2:
            return False
        (count, size), (stride, step), begin = rows.shape, rows.stride(), rows.data_ptr()
        if not count or size != nbytes or step != 1 or rows.is_neg():
            return False
        if begin == rows.storage_offset():
            return False
    except RuntimeError:
        return False
    return _is_free(begin, begin + (count - 1) * stride + nbytes, taken)


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
