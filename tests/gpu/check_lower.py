"""By hand on a machine with a GPU: a lowered model has the bits that it must have there, and what a step costs.

    PYTHONPATH=src python tests/gpu/check_lower.py [--batches 512 128] [--rounds 11] [--casts e4m3 ...]

Bits are compared first; a time is printed only after that. A step is forward, backward and SGD of ResNet-18 on random
32 x 32 images, plain and lowered in turn. "host" is the time until everything is launched, "GPU" the time that kernels
run, as the profiler has it; a step takes at least the longer of both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from narrowcast_research.bench.matmul import FORMATS, MODEL_RATIOS, resnet18
from torch import Tensor, nn
from torch.nn import functional

import narrowcast as nc
from narrowcast import simulate
from narrowcast.kernels import ops, triton_loader
from narrowcast.simulate.precision.casts import apply_casts, caster

CASTS = ("e4m3", "e5m2", "e4m3+sr")
"""Compiling takes most of the time of a check; --casts posit8.1 int8/64 ... for others."""


def same(what: str, got: Tensor, want: Tensor) -> int:
    """1, or the end of the program: every bit, NaN being NaN."""
    got, want = got.detach().cpu().contiguous(), want.detach().cpu().contiguous()
    equal = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
    assert bool(equal.all()), f"{what}: {int((~equal).sum())} of {equal.numel()} differ"
    return 1


def hard(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp(3 * torch.randn(shape, generator=g))
    flat = x.view(-1)
    flat[:6] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 1e-45, 3e38])
    return x


def layouts(x: Tensor) -> dict[str, Tensor]:
    shifted = torch.empty(x.numel() + 1, device=x.device)[1:].view_as(x).copy_(x)
    return {
        "contiguous": x,
        "channels last": x.to(memory_format=torch.channels_last),
        "not aligned": shifted,
        "transposed": x.transpose(1, 3),
        "with gaps": x[:, :, :, ::2],
        "empty": x[:0],
    }


def check_casts(names: Sequence[str] = CASTS) -> int:
    """A cast and its gradient on the device against the CPU."""
    count = 0
    for name in names:
        how, x, grad = caster(name), hard(4, 6, 16, 10), hard(4, 6, 16, 10, seed=1)
        if how.codec is not None:  # scales of NaN are the codecs' own tests
            x, grad = (t.nan_to_num(0.0, 1.0, -1.0).clamp(-9, 9) for t in (x, grad))
        for lie, here in layouts(x.cuda()).items():
            back = layouts(grad.cuda())[lie]
            leaves = [t.detach().clone(memory_format=torch.preserve_format) for t in (here, here.cpu())]
            outs = [apply_casts(leaf.requires_grad_(), how, how, (7, 2**63 + 1)) for leaf in leaves]
            for out, g in zip(outs, (back, back.cpu()), strict=True):
                out.backward(g)
            count += same(f"{name}, {lie}", outs[0], outs[1])
            count += same(f"{name}, {lie}, gradient", leaves[0].grad, leaves[1].grad)
    return count


class Small(nn.Module):
    """No statistics: nothing here is summed in an order that a device chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1, bias=False)
        self.last = nn.Linear(5 * 36, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last(torch.relu(x + self.second(x)).flatten(1))


def check_own_sums() -> int:
    """Forward and all gradients of a model whose sums are ours: the bits of the CPU."""
    count = 0
    for options in ({"accumulate": "bf16+kahan"}, {"accumulate": "fp16/64", "weights": "e4m3+sr", "seed": 5}):
        results = []
        for device in ("cuda", "cpu"):
            torch.manual_seed(0)
            model = Small().to(device)
            simulate.lower(model, **(FORMATS | options))
            x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
            out = model(x)
            out.backward(torch.linspace(-1, 1, out.numel()).view(4, 7).to(device))
            results.append({"out": out, "x": x.grad} | {name: p.grad for name, p in model.named_parameters()})
        for name, got in results[0].items():
            count += same(f"{options} {name}", got, results[1][name])
    return count


def check_torch_sums() -> int:
    """Where torch sums, a lowered layer is torch's own operation between casts: on the device, by hand."""
    count = 0
    weights, gradients = FORMATS["weights"], FORMATS["gradients"]
    x = torch.randn(8, 6, 12, 12, device="cuda")
    norm_grad = torch.randn(8, 6, 12, 12, device="cuda")
    conv, norm = nn.Conv2d(6, 9, 3, padding=1).cuda(), nn.BatchNorm2d(6).cuda()
    cases: tuple[tuple[nn.Module, Callable[..., Tensor], Tensor, bool], ...] = (
        (conv, lambda a, w, b: functional.conv2d(a, w, b, padding=1), torch.randn(8, 9, 12, 12, device="cuda"), False),
        (norm, lambda a, w, b: functional.batch_norm(a, None, None, w, b, True, 0.1, 1e-5), norm_grad, True),
    )
    for layer, compute, grad, rounded in cases:
        low = [nc.round_to(t.detach(), weights).requires_grad_() for t in (x, layer.weight, layer.bias)]
        want = compute(*low)
        want.backward(nc.round_to(grad, gradients))
        simulate.lower(layer, **FORMATS)
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.backward(grad)
        name = type(layer).__name__
        count += same(name, out, nc.round_to(want, weights) if rounded else want)
        count += same(f"{name} input", leaf.grad, low[0].grad)
        count += same(f"{name} weight", layer.weight.grad, nc.round_to(low[1].grad, gradients))
        count += same(f"{name} bias", layer.bias.grad, nc.round_to(low[2].grad, gradients))
    return count


# ---- costs -----------------------------------------------------------------------------------------------------------


def per_call(call: Callable[[], object], calls: int = 400) -> float:
    """Microseconds of the host; the queue is empty at the start and short enough not to fill."""
    best = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(best)


def print_pieces() -> None:
    """What one cast costs the host, from the inside out."""
    fmt, x = nc.format("e4m3"), torch.randn(4096, device="cuda")
    out, leaf, how, back = torch.empty_like(x), x.clone().requires_grad_(), caster("e4m3"), caster("e5m2")
    run, kept = triton_loader.load()[0].round_to, ops.rounder(fmt)

    def both_ways() -> None:
        apply_casts(leaf, how, back).backward(x)

    pieces = {
        "empty_like": lambda: torch.empty_like(x),
        "x + 1, by torch": lambda: torch.add(x, 1.0, out=out),
        "launch alone": lambda: run(x, fmt, "nearest", "inf", "ieee", 0, out),
        "rounder": lambda: kept(x),
        "round_to": lambda: nc.round_to(x, fmt),
        "cast, no gradient": lambda: apply_casts(x, how, back),
        "cast forward": lambda: apply_casts(leaf, how, back),
        "cast and backward": both_ways,
        "x.view_as and backward, by torch": lambda: leaf.view_as(leaf).backward(x),
    }
    print("microseconds of the host for", ", ".join(f"{name} {per_call(call):.1f}" for name, call in pieces.items()))


def stepper(lowered: bool, batch: int) -> Callable[[], None]:
    model = resnet18().cuda()
    if lowered:
        simulate.lower(model, **FORMATS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, labels = torch.randn(batch, 3, 32, 32, device="cuda"), torch.arange(batch, device="cuda") % 10

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds until everything is launched, and until it is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return 1e3 * (launched - start), 1e3 * (time.perf_counter() - start)


def on_device(step: Callable[[], None], steps: int = 3) -> tuple[float, float, float]:
    """Milliseconds of all kernels of a step, of our casts, and how many casts."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = [e for e in found.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    casts = [e for e in rows if "round_kernel" in e.key]
    total, ours = (sum(e.self_device_time_total for e in some) for some in (rows, casts))
    return total / 1e3 / steps, ours / 1e3 / steps, sum(e.count for e in casts) / steps


def print_steps(batch: int, rounds: int) -> None:
    steps = {"plain": stepper(False, batch), "lowered": stepper(True, batch)}
    for step in steps.values():
        for _ in range(4):
            step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timed(step))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    for name, step in steps.items():
        kernels, casts, count = on_device(step)
        host, whole = medians[name]
        print(
            f"batch {batch} {name}: step {whole:.2f} ms, host {host:.2f} ms, GPU {kernels:.2f} ms,"
            f" {count:.0f} casts {casts:.2f} ms", flush=True,
        )  # fmt: skip
    ratio, promised = medians["lowered"][1] / medians["plain"][1], MODEL_RATIOS["cuda"]
    print(f"batch {batch}: {ratio:.2f} times the plain step, promised {promised}: {ratio <= promised}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[512, 128])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--casts", nargs="*", default=CASTS, help="formats whose casts are compared with the CPU's")
    arguments = parser.parse_args()
    kernels = triton_loader.load()[1]
    print("torch", torch.__version__, kernels, "GPU:", torch.cuda.get_device_name(0), "formats:", FORMATS, flush=True)
    torch.backends.cudnn.deterministic = True
    for check in (partial(check_casts, arguments.casts), check_own_sums, check_torch_sums):
        start = time.perf_counter()
        name = getattr(check, "__name__", "check_casts")
        print(f"{name}: {check()} equal, {time.perf_counter() - start:.0f} s", flush=True)
    torch.backends.cudnn.deterministic = False
    print_pieces()
    for batch in arguments.batches:
        print_steps(batch, arguments.rounds)


if __name__ == "__main__":
    main()
