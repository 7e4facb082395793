"""The part of the summation tree that lies inside a process: gradients of micro-batches, added pairwise."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

Gradients = list[Tensor | None]


class CarryStack:
    """Sums gradients of micro-batches pairwise, like a binary counter: at most log2 k copies for k micro-batches.

    The i-th entry from the top that has height h is the sum of 2^h neighbouring micro-batches. A new one is added to
    the top as long as both have the same height: that is the carry.

    Args:
        parameters: whose `.grad` is summed; all that DDP reduces.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._stack: list[tuple[int, Gradients]] = []

    @torch.no_grad()
    def push(self) -> None:
        """Take the gradients of a micro-batch off the parameters."""
        gradients: Gradients = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        height = 0
        while self._stack and self._stack[-1][0] == height:
            gradients = [_sum(older, newer) for older, newer in zip(self._stack.pop()[1], gradients, strict=True)]
            height += 1
        self._stack.append((height, gradients))

    @torch.no_grad()
    def lend_zeros(self, loss: Tensor) -> None:
        """Make gradients of zeros for parameters that earlier micro-batches have used and the last one, of this `loss`,
        does not: DDP counts a parameter as used if any micro-batch of a step has used it, and then wants a gradient."""
        used = _leaves_of(loss)
        for i, parameter in enumerate(self.parameters):
            if id(parameter) not in used and any(gradients[i] is not None for _, gradients in self._stack):
                parameter.grad = torch.zeros_like(parameter)

    def fold_bucket(self, bucket: GradBucket) -> None:
        """Add the stack to a bucket that holds the last micro-batch's gradients, in place."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient = _laid_out_as(parameter, gradient)
            gradient.copy_(self._folded(self._index[id(parameter)], gradient))  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def fold(self) -> None:
        """Add the stack to the last micro-batch's gradients on the parameters: for a process that is alone."""
        for i, parameter in enumerate(self.parameters):
            parameter.grad = self._folded(i, parameter.grad)
        self.clear()

    def clear(self) -> None:
        """Forget all; a step has been taken, or given up."""
        self._stack.clear()

    def _folded(self, index: int, newest: Tensor | None) -> Tensor | None:
        for _, gradients in reversed(self._stack):
            newest = _sum(gradients[index], newest)
        return newest


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A bucket's piece as the reducer fills it: in the parameter's own memory order (channels_last, transposed, ...)
    where that is dense. `GradBucket.gradients()` calls every piece contiguous, and so mixes up its elements."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    if reach != parameter.numel():
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())


def _leaves_of(loss: Tensor) -> set[int]:
    """`id` of every parameter that backward will reach."""
    nodes, seen, leaves = [loss.grad_fn], set(), set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves.add(id(getattr(node, "variable", None)))  # AccumulateGrad's
        nodes += [following for following, _ in node.next_functions]
    return leaves


def _sum(older: Tensor | None, newer: Tensor | None) -> Tensor | None:
    """Their sum, in the older one's memory. Where a micro-batch does not use a parameter it has no gradient: DDP sends
    zeros for it, and so the sum is with zero, which makes a plus of a minus zero."""
    if older is None or newer is None:
        only = newer if older is None else older
        return None if only is None else only + 0.0
    return older.add_(newer)
