"""Blocks: those that a person would name, and every parameter in exactly one of them."""

import pytest
import torch
from torch import nn

from paceline.workloads.models import find_blocks
from paceline.workloads.registry import ModelOptions, build_model, default_form


def layer(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Layer(nn.Module):
    """A layer with a list of experts inside."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([layer(), layer()])

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


class Encoder(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(4))
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))


class Net(nn.Module):
    def __init__(self, num_layers=2):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.encoder = Encoder(num_layers)
        self.act = nn.ReLU()
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])


class Around(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def resnet_like():
    stages = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.Sequential(layer(), layer()))
    return nn.Sequential(stages, nn.Linear(4, 2))


def shared():
    once = layer()
    return nn.Sequential(nn.Sequential(once, layer()), nn.Sequential(layer(), once), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Net(), ["stem", "encoder.layers.0", "encoder.layers.1", "heads.0", "heads.1"]),
        (Net(1), ["stem", "encoder.layers.0", "heads.0", "heads.1"]),
        (
            Around(Net()),
            ["module.stem", "module.encoder.layers.0", "module.encoder.layers.1", "module.heads.0", "module.heads.1"],
        ),
        (layer(), ["0", "2"]),
        (Around(layer()), ["module.0", "module.2"]),
        (nn.Linear(2, 2), [""]),
        (Around(nn.Linear(2, 2)), ["module"]),
        (resnet_like(), ["0.0", "0.1.0", "0.1.1", "1"]),
        (shared(), ["0.0", "0.1", "1.0", "2"]),
        (nn.Sequential(Encoder(2), nn.Linear(4, 4)), ["0.layers.0", "0.layers.1", "1"]),
        (nn.ReLU(), [""]),
    ],
)
def test_the_blocks_have_the_names_that_one_expects(module, names):
    blocks = find_blocks(module)
    assert [name for name, _ in blocks] == names
    assert all(module.get_submodule(name) is block for name, block in blocks)


@pytest.mark.parametrize(
    ("name", "first", "last", "count"),
    [
        ("cnn", "0", "8", 4),
        ("resnet18", "stem", "head", 10),
        ("gpt2-tiny", "tokens", "norm", 7),
        ("linear", "0", "0", 1),
    ],
)
def test_the_blocks_of_the_models_here(name, first, last, count):
    options = ModelOptions()
    names = [block for block, _ in find_blocks(build_model(name, default_form(name, options), options))]
    assert (names[0], names[-1], len(names)) == (first, last, count)


def test_a_module_with_parameters_of_its_own_and_no_parts_is_one_block():
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2))
    assert find_blocks(module) == [("", module)]
