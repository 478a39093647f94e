"""The kernels that merge adapters and dequantise match torch: to the bit wherever the sum over the ranks has no rounding."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plaudit.models import merged, quantised
from plaudit.models.merged import Adapter, QuantisedProduct, StoredProduct, merge_into
from plaudit.models.quantised import QuantisedLinear, Scratch, dequantise_into, nf4_levels, quantise
from support.interpreter import DEVICE, SHARED, interpreter

with interpreter():
    pytest.importorskip("triton", reason="kernels need Triton; the dev extra installs it on machines without a GPU")
    kernels = importlib.import_module(SHARED)

pytestmark = pytest.mark.grid(5)
SCALE = 2.0
DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(37, 80), (5, 64), (130, 200), (140, 192), (7, 33)]  # with and without complete blocks in a row; more than one tile
RANKS = [[1, 40], [3, 40], [3], [16], [1, 16]]  # of each shape: the interpreter is slow
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_rank = pytest.mark.parametrize("rank", [1, 3, 16, 40])
each_shape_and_rank = pytest.mark.parametrize(
    ("shape", "rank"), [(shape, rank) for shape, ranks in zip(SHAPES, RANKS, strict=True) for rank in ranks], ids=str
)
each_bits = pytest.mark.parametrize("bits", [4, 8])


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with interpreter():
        yield


def weight_of(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (0.03 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def factors_of(shape: tuple[int, int], rank: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """A and B whose products and sums are exact in fp32, in any order."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randint(-8, 9, (rank, shape[1]), generator=g).float()
    return a, torch.randint(-8, 9, (shape[0], rank), generator=g) * 2.0**-20


def merged_by_torch(base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty_like(base)
    merge_into(out, base, a, b, SCALE)
    return out


def merged_by_kernel(base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    out = torch.full_like(base, torch.nan, device=DEVICE)
    kernels.merge(out, *(tensor.to(DEVICE) for tensor in (base, a, b)), SCALE)
    return out.cpu()


def dequantised_by_torch(like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    out = torch.empty_like(like)
    dequantise_into(out, codes, scales)
    return out


def dequantised_by_kernel(like: Tensor, codes: Tensor, scales: Tensor, *factors: Tensor) -> Tensor:
    out, levels = torch.full_like(like, torch.nan, device=DEVICE), nf4_levels(DEVICE)
    codes, scales, *factors = (tensor.to(DEVICE) for tensor in (codes, scales, *factors))  # pyright: ignore
    if factors:
        kernels.dequantise_merged(out, codes, scales, levels, *factors, SCALE)
    else:
        kernels.dequantise(out, codes, scales, levels)
    return out.cpu()


@each_dtype
@each_shape_and_rank
def test_merge(dtype, shape, rank):
    base, (a, b) = weight_of(shape, dtype), factors_of(shape, rank)
    found = merged_by_kernel(base, a, b)
    assert torch.equal(found, merged_by_torch(base, a, b))
    assert (found != base).float().mean() > 0.01
    in_place = base.to(DEVICE)
    kernels.merge(in_place, in_place, a.to(DEVICE), b.to(DEVICE), SCALE)
    assert torch.equal(in_place.cpu(), found)


@each_dtype
@each_shape
def test_a_weight_without_an_update_stays_as_it_is(dtype, shape):
    base, (a, b) = weight_of(shape, dtype), factors_of(shape, 3)
    assert torch.equal(merged_by_kernel(base, a, 0 * b), base)


@pytest.mark.parametrize("update", [1e-6, 1e-4, 1e-2])
@each_rank
def test_rounding_to_one_of_two_neighbours_keeps_the_mean(update, rank):
    g = torch.Generator().manual_seed(rank)
    base, a, b = weight_of((128, 192), torch.bfloat16), torch.randn(rank, 192, generator=g), torch.randn(128, rank, generator=g)
    b *= update * rank**-0.5
    exact = base.double() + SCALE * b.double() @ a.double()
    found = merged_by_kernel(base, a, b)
    toward_0 = (exact.float().view(torch.int32) & -0x10000).view(torch.float32)
    away = ((exact.float().view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert ((found.float() == toward_0) | (found.float() == away)).double().mean() > 0.9999, "the sum is not exact"
    up = (exact - toward_0) / (away - toward_0)  # the probability of being rounded away from 0
    noise = ((away - toward_0).square() * up * (1 - up)).clamp(min=0).sum().sqrt()
    assert (found.double() - exact).sum().abs() < 4 * noise
    assert (found == merged_by_torch(base, a, b)).double().mean() > 0.999, "the same noise"


@each_rank
def test_fp32_is_not_rounded(rank):
    g = torch.Generator().manual_seed(rank)
    base, a, b = (torch.randn(size, generator=g) for size in ((37, 80), (rank, 80), (37, rank)))
    exact = base.double() + SCALE * b.double() @ a.double()
    torch.testing.assert_close(merged_by_kernel(base, a, b).double(), exact, rtol=1e-6, atol=1e-6 * rank)


def test_nan_remains_nan():
    """A GPU's NaN has all bits set: noise would make a 0 of it."""
    base, (a, b) = weight_of((5, 64), torch.bfloat16), factors_of((5, 64), 3)
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    b[2, 1] = nan
    found = merged_by_kernel(base, a, b)
    assert found[2].isnan().all()
    assert torch.equal(found[3:], merged_by_torch(base, a, b)[3:])
    codes, scales = quantise(base, 8)
    scales[1] = nan
    found = dequantised_by_kernel(base, codes, scales)
    assert found.isnan().all(1).tolist() == [False, True, False, False, False]


@each_bits
@each_shape
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_dequantise(bits, shape, dtype):
    weight = weight_of(shape, dtype)
    weight.view(-1)[:64] = 0
    codes, scales = quantise(weight, bits)
    expected = dequantised_by_torch(weight, codes, scales)
    assert torch.equal(dequantised_by_kernel(weight, codes, scales), expected)
    assert (expected != weight).any()


@each_bits
@each_dtype
@each_shape_and_rank
def test_dequantise_and_merge(bits, shape, dtype, rank):
    """As one after the other, to the bit, also where the sum over the ranks is rounded."""
    weight, (a, b) = weight_of(shape, dtype), factors_of(shape, rank)
    codes, scales = quantise(weight, bits)
    base = dequantised_by_torch(weight, codes, scales)
    assert torch.equal(dequantised_by_kernel(weight, codes, scales, a, b), merged_by_torch(base, a, b))
    assert torch.equal(dequantised_by_kernel(weight, codes, scales, a, 0 * b), base)
    a, b = a / 3, b / 3
    assert torch.equal(dequantised_by_kernel(weight, codes, scales, a, b), merged_by_kernel(base, a, b))


# Products ------------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer with an adapter, as peft has it."""

    disable_adapters = False

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor):
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = (nn.ModuleDict({"default": nn.Linear(*factor.shape[::-1], bias=False)}) for factor in (a, b))
        self.lora_A["default"].weight.data, self.lora_B["default"].weight.data = a.to(DEVICE), b.to(DEVICE)
        self.scaling = {"default": SCALE}


def linear_layers(heights: list[int], ranks: list[int], dtype: torch.dtype, bits: Any) -> list[nn.Module]:
    """Over the same input; those of rank 0 have no adapter."""
    scratch, layers = Scratch(), []
    for i, (height, rank) in enumerate(zip(heights, ranks, strict=True)):
        shape = (height, 80)
        layer: nn.Module = nn.Linear(80, height, bias=False)
        layer.weight.data = weight_of(shape, dtype, seed=i).to(DEVICE)
        layer = layer if bits is None else QuantisedLinear(layer, bits, scratch, DEVICE)  # pyright: ignore
        layers.append(Adapted(layer, *factors_of(shape, rank, seed=i + 9)) if rank else layer)
    return layers


def made_alone(module: Any) -> Tensor:
    """By torch, of one layer."""
    base: Any = getattr(module, "base_layer", module)
    weight = base.weight.detach().cpu()
    if base is module:
        return weight
    return merged_by_torch(weight, *(factor["default"].weight.detach().cpu() for factor in (module.lora_A, module.lora_B)))


@pytest.fixture
def _with_kernels(monkeypatch):
    for module in (merged, quantised):
        monkeypatch.setattr(module, "kernels_for", lambda device: kernels)


@pytest.mark.parametrize("bits", [None, 4, 8])
@each_dtype
@pytest.mark.parametrize("ranks", [[3, 16, 1], [0, 3, 0, 40, 0], [5, 0, 0, 2]], ids=str)
def test_a_layers_weights_are_the_same_in_a_product_and_alone(request, bits, dtype, ranks):
    modules = linear_layers([33, 5, 70, 9, 40][: len(ranks)], ranks, dtype, bits)
    expected = torch.cat([made_alone(module) for module in modules])
    bases = torch.cat([getattr(module, "base_layer", module).weight.detach().cpu() for module in modules])
    request.getfixturevalue("_with_kernels")
    product = StoredProduct(modules, nn.Module(), "merged") if bits is None else QuantisedProduct(modules)
    product.merge()
    assert torch.equal(product.weight_OI.cpu(), expected)
    adapters: list[Adapter] = product.adapters
    assert [adapter.ranks.stop - adapter.ranks.start for adapter in adapters] == [rank for rank in ranks if rank]
    for adapter in adapters:
        assert torch.equal(product.weight_of(adapter).cpu(), expected[adapter.rows])
    x = torch.eye(80, dtype=dtype, device=DEVICE)
    assert torch.equal(product(x).detach().cpu().T, expected)
    if isinstance(product, QuantisedProduct):
        for adapter in adapters:
            adapter.module.disable_adapters = True
        assert torch.equal(product(x).detach().cpu().T, bases)
        assert torch.equal(product.base_layers[1](x).cpu().T, product.base_layers[1].weight.cpu())


def test_torch_computes_on_a_cpu():
    assert quantised.kernels_for(torch.device("cpu")) is None
