"""All-reduce algorithms as communication hooks of DistributedDataParallel, overlapped with backward."""

import contextvars
import math
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lit_dp.collectives.algorithms import Algorithm, all_reduce

Fold = Callable[[GradBucket], None]
LANES = 2
COMPRESSIONS = ("fp16", "bf16", "powersgd")
CHOICES = (*Algorithm.__members__, *COMPRESSIONS)
"""What `all_reduce` may be: an algorithm, or one of torch's compressions of the backend's own algorithm."""


class GradientExchange:
    """A hook that sums every bucket over the ranks by a named algorithm and divides by their number.

    Buckets are exchanged in the order in which backward completes them, the same on all ranks, while backward goes on:
    on a CPU in lanes, each a thread with a process group of its own, so that the messages of other collectives do not
    come between; on CUDA on a stream of its own.

    All ranks build it together.

    Args:
        algorithm: how ranks exchange.
        device: where gradients are.
        fold: called with each bucket, in backward's thread, before it is exchanged; may add to it in place.
        timeout: after which an exchange that not all ranks joined is an error; torch's default is half an hour.
    """

    def __init__(
        self, algorithm: str, device: torch.device, fold: Fold | None = None, timeout: timedelta | None = None
    ) -> None:
        self.algorithm, self.fold, self.device = Algorithm(algorithm), fold, device
        # Half a bucket a lane: while one of them adds, the other keeps the link busy.
        lanes = LANES if device.type == "cpu" else 1
        self.groups: list[Any] = [dist.new_group(timeout=timeout) for _ in range(lanes)]
        self._workers = [ThreadPoolExecutor(1, "all-reduce") for _ in range(lanes)] if device.type == "cpu" else []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """What DDP calls for every bucket; the future's tensor is the bucket's buffer, holding the mean."""
        if self.fold is not None:
            self.fold(bucket)
        if self._stream is not None:
            return self._on_stream(bucket.buffer(), self._stream)
        pieces = bucket.buffer().chunk(len(self._workers))
        completion = _Completion(bucket.buffer(), len(pieces))
        for piece, worker, group in zip(pieces, self._workers, self.groups, strict=False):
            worker.submit(contextvars.copy_context().run, self._complete, completion, piece, group)
        return completion.future

    def close(self) -> None:
        """Wait for what is under way and end the threads."""
        for worker in self._workers:
            worker.shutdown()

    def _complete(self, completion: "_Completion", piece: Tensor, group: Any) -> None:
        try:
            self._mean(piece, group)
        except Exception as error:  # whatever it is, backward must not wait for ever
            completion.fail(error)
        else:
            completion.one_done()

    def _on_stream(self, buffer: Tensor, stream: torch.cuda.Stream) -> Future[Tensor]:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        future: Future[Tensor] = Future(devices=[self.device])
        with torch.cuda.stream(stream):  # the future notes the stream that it is completed on
            future.set_result(self._mean(buffer, self.groups[0]))
        return future

    def _mean(self, piece: Tensor, group: Any) -> Tensor:
        return all_reduce(piece, self.algorithm.value, group).div_(group.size())


class _Completion:
    """A future of a bucket that is done when all its pieces are, or when the first of them failed."""

    def __init__(self, buffer: Tensor, pieces: int) -> None:
        self.future: Future[Tensor] = Future()
        self._buffer, self._left, self._lock = buffer, pieces, threading.Lock()

    def one_done(self) -> None:
        with self._lock:
            self._left -= 1
            done = self._left == 0
        if done:
            self.future.set_result(self._buffer)

    def fail(self, error: Exception) -> None:
        with self._lock:
            first, self._left = self._left > 0, -1  # never 0 again
        if first:
            self.future.set_exception(error)  # pyright: ignore[reportArgumentType] - torch's stub is wrong


def register(
    model: DistributedDataParallel,
    name: str,
    device: torch.device,
    fold: Fold | None = None,
    timeout: timedelta | None = None,
) -> GradientExchange | PowerSGDState | None:
    """Make `model` reduce its gradients as `name` says; all ranks call it, once, before the first backward.

    Returns:
        What has to be closed (an exchange) or saved (PowerSGD's state), or None.
    """
    if name == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)  # pyright: ignore[reportArgumentType]
    elif name == "bf16":
        model.register_comm_hook(None, bf16_compress_hook)  # pyright: ignore[reportArgumentType]
    elif name == "powersgd":
        # A group of its own: on gloo its chained exchanges would mix with other collectives of the default group.
        state = PowerSGDState(
            process_group=dist.new_group(timeout=timeout), matrix_approximation_rank=1, start_powerSGD_iter=10
        )  # type: ignore
        model.register_comm_hook(state, powerSGD_hook)
        # see bucket_limits: it is not for unused parameters that DDP looks for them
        warnings.filterwarnings("ignore", ".*find_unused_parameters=True was specified")
        return state
    elif name != Algorithm.native.value or fold is not None:
        exchange = GradientExchange(name, device, fold, timeout)
        model.register_comm_hook(None, exchange.hook)
        return exchange
    return None


def bucket_limits(name: str, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Arguments for DDP that an exchange needs.

    PowerSGD's memory is laid out as the buckets are, and DDP lays them out anew after the first step, hence after a
    resume too; it does not where it looks for unused parameters. On gloo the exchanges of several buckets, which are
    chained by callbacks, would mix: it gets one bucket.
    """
    if name != "powersgd":
        return {}
    megabytes = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    one_bucket = {"bucket_cap_mb": math.ceil(megabytes) + 1} if device.type == "cpu" else {}
    return {"find_unused_parameters": True, **one_bucket}


POWERSGD_ENTRIES = ("iter", "error_dict", "p_memory_dict", "q_memory_dict")


def powersgd_state(state: PowerSGDState) -> dict[str, Any]:
    """This rank's state as plain containers of tensors and numbers; the errors differ from rank to rank."""
    return {name: getattr(state, name) for name in POWERSGD_ENTRIES}


def restore_powersgd(state: PowerSGDState, saved: dict[str, Any], device: torch.device) -> None:
    """Put a saved state back, on `device`."""
    for name, value in saved.items():
        on_device = {k: t.to(device) for k, t in value.items()} if isinstance(value, dict) else value
        setattr(state, name, on_device)
