"""Giving a call to its channel, on the lane of its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.collectives.runtime.agreement import Signature
from narrowcast.collectives.runtime.channel import Channel, Job
from narrowcast.collectives.runtime.messages import Exchange
from narrowcast.collectives.runtime.streams import HOST, Visit, lane_of
from narrowcast.collectives.work import Work


def submit(channel: Channel, signature: Signature, job: Job, tensors: Sequence[Tensor]) -> Work:
    """Run `job` in its turn. `tensors` are all that it reads and writes: they are on one device, which tells the lane,
    and a call that uses the same memory waits until this one is over.

    What it reads has been given to the current stream; what it writes is there for any stream that waited for the work.
    """
    lane = lane_of(channel.transport, tensors[0].device)
    if torch.is_inference_mode_enabled():
        job = _inferring(job)
    if lane is HOST:
        return channel.submit(signature, job, tensors=tensors)
    visit = Visit(lane, tensors)

    def there(exchange: Exchange) -> None:
        here = exchange.on(lane)
        with visit.working():
            job(here)
        exchange.sent_bytes += here.sent_bytes

    return channel.submit(signature, there, Work(visit), tensors)


def _inferring(job: Job) -> Job:
    """The mode is each thread's own: what the caller may write, the channel's thread must be allowed to."""

    def within(exchange: Exchange) -> None:
        with torch.inference_mode():
            job(exchange)

    return within
