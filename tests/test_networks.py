import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lit_dp.networks import MLP, SmallCNN


def assert_every_parameter_learns(network: nn.Module, inputs: torch.Tensor, num_classes: int) -> None:
    labels = torch.arange(len(inputs)) % num_classes
    cross_entropy(network(inputs), labels).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("side", [8, 9, 17, 28, 32])
@pytest.mark.parametrize("channels", [1, 3])
def test_cnn_takes_images_of_any_size_from_8(side: int, channels: int) -> None:
    torch.manual_seed(0)
    network = SmallCNN(num_classes=7, in_channels=channels, width=4)
    images = torch.randn(6, channels, side, side)
    logits = network(images)
    assert logits.shape == (6, 7)
    assert logits.dtype == torch.float32
    assert_every_parameter_learns(network, images, 7)


def test_cnn_takes_images_that_are_not_square() -> None:
    assert SmallCNN(num_classes=3, width=4)(torch.randn(2, 1, 8, 31)).shape == (2, 3)


@pytest.mark.parametrize(("images", "side"), [(1, 16), (2, 8)])
def test_cnn_trains_on_the_smallest_batch_that_batchnorm_takes(images: int, side: int) -> None:
    """The last batch of a rank may be this short."""
    torch.manual_seed(0)
    network = SmallCNN(num_classes=3, width=4)
    assert network(torch.randn(images, 1, side, side)).shape == (images, 3)


def test_cnn_in_evaluation_sees_each_image_by_itself() -> None:
    torch.manual_seed(0)
    network = SmallCNN(num_classes=5, width=4, dropout=0.5)
    images = torch.randn(6, 1, 12, 12)
    network(images)
    network.eval()
    together = network(images)
    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(together, alone)


def test_cnn_computes_in_channels_last_what_it_would_in_the_usual_layout() -> None:
    torch.manual_seed(0)
    network = SmallCNN(num_classes=5, in_channels=3, width=4).eval()
    weights = [parameter for parameter in network.parameters() if parameter.ndim == 4]
    assert len(weights) == 6
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    images = torch.randn(6, 3, 16, 16)
    logits = network(images)
    network.to(memory_format=torch.contiguous_format)
    torch.testing.assert_close(network(images), logits)


def test_cnn_is_as_large_as_its_docstring_says() -> None:
    assert sum(parameter.numel() for parameter in SmallCNN(num_classes=10).parameters()) == 236_922


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    network = SmallCNN(num_classes=5, width=4, dropout=0.5)
    images = torch.randn(6, 1, 8, 8)
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))


def test_mlp_is_linear_layers_with_relu_between() -> None:
    torch.manual_seed(0)
    network = MLP(in_features=64, hidden=[20, 10], num_classes=3)
    images = torch.randn(5, 1, 8, 8)
    first, second, last = (layer for layer in network if isinstance(layer, nn.Linear))
    expected = last(second(first(images.flatten(1)).relu()).relu())
    assert torch.equal(network(images), expected)
    assert [layer.weight.shape for layer in (first, second, last)] == [(20, 64), (10, 20), (3, 10)]
    assert_every_parameter_learns(network, images, 3)


def test_mlp_without_hidden_layers_is_linear() -> None:
    torch.manual_seed(0)
    network = MLP(in_features=4, hidden=[], num_classes=2)
    a, b = torch.randn(2, 3, 4)
    torch.testing.assert_close(network(a + b), network(a) + network(b) - network(torch.zeros(3, 4)))
