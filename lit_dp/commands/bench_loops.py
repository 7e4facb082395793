"""Two loops by hand, side by side: (a) as tutorials write it, and (b) tuned. They train the same weights, bit for bit.

    torchrun --nproc-per-node 2 -m lit_dp.commands.bench_loops --job cnn --data ../shared/data --first-step FILE

The second form stops after one step, and says when that was.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lit_dp.commands.bench_clock import Clock, note_first_step
from lit_dp.commands.bench_jobs import JOBS, LEARNING_RATE, MOMENTUM, Data, Images, Job, scaled

AfterStep = Callable[[], None] | None
Trained = tuple[nn.Module, "Validated"]


class Validated(NamedTuple):
    """Mean loss, and share of samples whose largest logit is the label, over all ranks."""

    loss: float
    accuracy: float


def tutorial(job: Job, data: Data, epochs: int, clock: Clock, after_step: AfterStep = None) -> Trained:
    """What one learns from: a dataset read sample by sample, and every default as it is."""
    device, world_size, rank = place()
    network = job.build(plain=True).to(device)
    model = DistributedDataParallel(network, _device_ids(device)) if world_size > 1 else network
    train_set, val_set = data.tutorial(train=True), data.tutorial(train=False)
    pin = device.type == "cuda"
    sampler = DistributedSampler(train_set, world_size, rank)  # pyright: ignore[reportArgumentType]
    train_loader = DataLoader(train_set, job.batch, sampler=sampler, pin_memory=pin)
    val_loader = _val_loader(val_set, job.batch, world_size, rank, pin)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)

    validated = Validated(0.0, 0.0)
    clock.begin()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        clock.epoch()
        for images, labels in train_loader:
            clock.tick()
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            if after_step is not None:
                after_step()

        model.eval()
        loss_sum, correct, samples = 0.0, 0, 0
        with torch.no_grad():
            for images, labels in val_loader:
                images, labels = images.to(device), labels.to(device)
                logits = model(images)
                loss_sum += cross_entropy(logits, labels).item() * len(labels)
                correct += (logits.argmax(dim=1) == labels).sum().item()
                samples += len(labels)
        validated = over_ranks(torch.tensor([loss_sum, correct, samples], dtype=torch.float64, device=device))
        if rank == 0:
            print(f"epoch {epoch + 1}: val loss {validated.loss:.4f}, accuracy {validated.accuracy:.4f}", flush=True)
    clock.end()
    return network, validated


def tuned(job: Job, data: Data, epochs: int, clock: Clock, after_step: AfterStep = None) -> Trained:
    """The same training as fast as it goes by hand: batches gathered from memory, gradients that are views of buckets,
    no broadcast where there are no buffers, weights in channels_last, nothing fetched from the device."""
    device, world_size, rank = place()
    network = job.build().to(device)
    model: nn.Module = network
    buffers = list(network.buffers())
    if world_size > 1:
        model = DistributedDataParallel(
            network, _device_ids(device), gradient_as_bucket_view=True, forward_sync_buffers=bool(buffers)
        )
    train, val = data.held(train=True), data.held(train=False)
    val = Images(val.images[rank::world_size].contiguous(), val.labels[rank::world_size].contiguous())
    sampler = DistributedSampler(range(len(train.labels)), world_size, rank)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE, MOMENTUM)

    validated = Validated(0.0, 0.0)
    clock.begin()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        clock.epoch()
        for indices in torch.tensor(list(sampler)).split(job.batch):
            images, labels = gathered(train, indices, device)
            clock.tick()
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(scaled(images)), labels).backward()
            optimizer.step()
            if after_step is not None:
                after_step()

        network.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        with torch.inference_mode():
            for buffer in buffers if world_size > 1 else []:  # once, where DDP would before every batch
                dist.broadcast(buffer, 0)
            for indices in torch.arange(len(val.labels)).split(job.batch):
                images, labels = gathered(val, indices, device)
                logits = network(scaled(images))
                sums[0] += cross_entropy(logits, labels).double() * len(labels)
                sums[1] += (logits.argmax(dim=1) == labels).sum()
                sums[2] += len(labels)
        validated = over_ranks(sums)
        if rank == 0:
            print(f"epoch {epoch + 1}: val loss {validated.loss:.4f}, accuracy {validated.accuracy:.4f}", flush=True)
    clock.end()
    return network, validated


def place() -> tuple[torch.device, int, int]:
    """Device, world size and rank: of the process group where there is one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return (device, dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (device, 1, 0)


def _device_ids(device: torch.device) -> list[int] | None:
    return [device.index] if device.type == "cuda" else None


def _val_loader(dataset: Dataset[Any], batch: int, world_size: int, rank: int, pin: bool) -> DataLoader[Any]:
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=False)  # pyright: ignore[reportArgumentType]
    return DataLoader(dataset, batch, sampler=sampler, pin_memory=pin)


def gathered(data: Images, indices: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch of images uint8 (B, C, H, W) and labels int64 (B,), on its way to the device."""
    images, labels = data.images.index_select(0, indices), data.labels[indices]
    if device.type != "cuda":
        return images, labels
    return images.pin_memory().to(device, non_blocking=True), labels.pin_memory().to(device, non_blocking=True)


def over_ranks(sums: Tensor) -> Validated:
    """Of this rank's sums, float64 (3,): of losses, of right answers, of samples. All ranks call it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    loss, correct, samples = sums.tolist()
    return Validated(loss / samples, correct / samples)


def main() -> None:
    """The tutorial's loop, until its first step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--data", default="data")
    parser.add_argument("--first-step", required=True)
    options = parser.parse_args()

    def stop() -> None:
        note_first_step(options.first_step)
        raise _Done

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        tutorial(JOBS[options.job], Data(options.job, options.data), 1, Clock(), stop)
    except _Done:
        pass
    finally:
        dist.destroy_process_group()


class _Done(Exception):
    pass


if __name__ == "__main__":
    main()
