"""Checksums of tensors, taken on the device that holds them: only 64 bits a tensor come to the host."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

CHUNK = 2**20
"""Elements at once: the products of a chunk take 8 MiB on the device."""
GOLDEN = -7046029254386353131
"""2^64 over the golden ratio: odd, so multiplying by it loses no bit."""


def checksums(values: Mapping[str, Any]) -> dict[str, int]:
    """A 64-bit checksum of each value: equal for equal bits in equal memory order, another where one element differs or
    two have changed places (where more differ, up to a chance of 2^-32 or less).

    Args:
        values: tensors of any dtype, layout and device, empty ones too; and numbers, which count by their `repr`.
    """
    bits = {name: bits_of(value) for name, value in values.items() if isinstance(value, Tensor)}
    longest: dict[torch.device, int] = {}
    for piece in bits.values():
        longest[piece.device] = max(longest.get(piece.device, 0), min(len(piece), CHUNK))
    weights = {device: _weights(count, device) for device, count in longest.items()}
    sums = _on_host({name: _weighted_sum(piece, weights[piece.device]) for name, piece in bits.items()})
    return {name: sums[name] if name in sums else crc32(repr(value).encode()) for name, value in values.items()}


def bits_of(tensor: Tensor) -> Tensor:
    """A tensor's elements as integers of up to 32 bits, (N,), in the order in which they lie in memory: without a copy
    where the memory has no gaps (channels_last and transposed tensors too)."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if reach == tensor.numel() and not tensor.is_contiguous():
        flat = tensor.as_strided((tensor.numel(),), (1,))
    else:
        flat = tensor.contiguous().view(-1)
    return flat.view({1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32))


def _weighted_sum(bits: Tensor, weights: Tensor) -> Tensor:
    """Sum of element times weight of its place, modulo 2^64: int64 ()."""
    if len(bits) <= CHUNK:
        return (bits * weights[: len(bits)]).sum()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(CHUNK):
        total = total * GOLDEN + (chunk * weights[: len(chunk)]).sum()
    return total


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd int64 (count,) without a pattern, the same on every device: SplitMix64's mixing (Steele, Lea and Flood 2014).

    Weights 1, 3, 5, ... would find one wrong element, but not four neighbours that are +1, -1, -1 and +1 last bit off.
    """
    mixed = torch.arange(1, count + 1, device=device) * GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed ^ (mixed >> 31)) | 1


def _on_host(sums: dict[str, Tensor]) -> dict[str, int]:
    """Read all sums of a device at once: one wait for it."""
    read: dict[str, int] = {}
    for device in {value.device for value in sums.values()}:
        names = [name for name, value in sums.items() if value.device == device]
        read.update(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
    return read
