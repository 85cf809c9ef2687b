"""Statistics agree with numpy's in float64, whatever the dtype, the strides, the buckets and the shards."""

from __future__ import annotations

import math
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from statistics_files import Statistics, statistics_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ort_zero.statistics import rows as layout
from ort_zero.statistics.collect import tensor_statistics as module
from ort_zero.statistics.collect.tensor_statistics import measure_into, sampled
from ort_zero.statistics.rows import FIRST, WIDTH, merge

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
SIZES = (0, 1, 7, 63, 64, 65, 1023, 1024, 1025, 4095, 4096, 4097, 12287, 12289)
EXACT = [*range(3), *range(layout.NEGATIVE, layout.FIRST_AT + FIRST)]
"""Columns that no summation order changes."""
MASK = 2**64 - 1


def measure_raw(tensor: torch.Tensor, offset: int = 0) -> np.ndarray:
    row = np.empty(WIDTH)
    measure_into(row, tensor, offset)
    return row


def measure(tensor: torch.Tensor) -> Statistics:
    return statistics_of(measure_raw(tensor))


def mixed(number: int) -> int:
    """splitmix64, in Python's integers."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & MASK
    return number ^ (number >> 31)


def signs(word: int) -> list[int]:
    return [-1 if word >> bit & 1 else 1 for bit in range(64)]


TABLE = np.concatenate([signs(mixed(MASK - row)) for row in range(64)])


def sketch_of(values: np.ndarray, offset: int = 0) -> np.ndarray:
    """The sketch, by its definition."""
    index = np.arange(offset, offset + len(values))
    first = offset // 4096
    blocks = np.array([signs(mixed(first + k)) for k in range(len(values) // 4096 + 2)])
    terms = np.where(np.isfinite(values), values, 0) * TABLE[index % 4096] * blocks[index // 4096 - first, index % 64]
    return np.bincount(index % 64, terms, minlength=64)


def numpy_row(tensor: torch.Tensor, offset: int = 0) -> np.ndarray:
    """What a row should be."""
    values = tensor.detach().to(torch.float64).contiguous().numpy().reshape(-1)
    good = values[np.isfinite(values)]
    nan, inf = np.isnan(values).sum(), np.isinf(values).sum()
    moments = [good.min(), good.max(), good.mean(), good.std()] if len(good) else [np.nan] * 4
    sizes = [np.abs(good).mean() if len(good) else 0, np.sqrt((good**2).sum())]
    counts = [(good < 0).sum(), (good > 0).sum(), (good == 0).sum(), nan, inf]
    first = np.pad(values[:8], (0, max(0, 8 - len(values))), constant_values=np.nan)
    return np.array([len(values), *moments, *sizes, *counts, *first, *sketch_of(values, offset)], dtype=np.float64)


def assert_close(found: np.ndarray, wanted: np.ndarray, relative: float = 2e-7) -> None:
    """Exact columns are the same; sums differ by a fraction of the sum of their terms' sizes."""
    np.testing.assert_array_equal(found[EXACT], wanted[EXACT])
    size, l2 = np.nan_to_num(wanted[[layout.ABS_MEAN, layout.L2]])
    np.testing.assert_allclose(found[layout.MEAN], wanted[layout.MEAN], rtol=0, atol=relative * size)
    for column in (layout.STD, layout.ABS_MEAN, layout.L2):
        np.testing.assert_allclose(found[column], wanted[column], rtol=relative, atol=1e-14 * l2)
    np.testing.assert_allclose(found[layout.SKETCH_COLUMNS], wanted[layout.SKETCH_COLUMNS], rtol=0, atol=relative * l2)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Values of every sign, and zeros."""
    values = (
        (normal(size) * 3).round() if not dtype.is_floating_point else torch.where(normal(size) > 1, 0, normal(size))
    )
    return values.to(torch.int16).to(dtype) if not dtype.is_floating_point else values.to(dtype)


def with_holes(values: torch.Tensor) -> torch.Tensor:
    """The values with NaN and inf among them."""
    values = values.clone()
    values.view(-1)[3::11] = math.nan
    values.view(-1)[5::17] = math.inf
    values.view(-1)[6::1701] = -math.inf
    return values


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_agrees_with_numpy(dtype, size):
    assert_close(measure_raw(some(dtype, size)), numpy_row(some(dtype, size)))


def test_a_row_becomes_statistics():
    found = measure(torch.tensor([[3.0, -4.0], [0.0, math.nan]]))
    assert (found.elements, found.min, found.max, found.mean) == (4, -4, 3, pytest.approx(-1 / 3))
    assert (found.std, found.abs_mean, found.l2) == pytest.approx((math.sqrt(74) / 3, 7 / 3, 5))
    assert (found.negative, found.positive, found.zero, found.nan, found.inf) == (1, 1, 1, 1, 0)
    assert found.first[:3] == (3, -4, 0) and math.isnan(found.first[3]) and len(found.first) == 4
    assert len(found.sketch) == 64 and sorted(map(abs, found.sketch))[-2:] == [3, 4]
    assert type(found.elements) is int and type(found.mean) is float


def test_edges():
    nothing = measure(torch.empty(0, 3))
    assert (nothing.elements, nothing.abs_mean, nothing.l2, nothing.first) == (0, 0, 0, ())
    assert all(math.isnan(value) for value in (nothing.min, nothing.max, nothing.mean, nothing.std))
    scalar = measure(torch.tensor(-2.5))
    assert (scalar.elements, scalar.min, scalar.std, scalar.first) == (1, -2.5, 0, (-2.5,))
    zeros = measure(torch.tensor([-0.0, 0.0, 1.0]))
    assert (zeros.negative, zeros.zero, zeros.positive) == (0, 2, 1)
    large = measure(torch.tensor([-(2**63), 2**63 - 1, 2**53, 5]))
    assert (large.min, large.max, large.first) == (-(2.0**63), 2.0**63, (-(2.0**63), 2.0**63, 2.0**53, 5.0))


@pytest.mark.parametrize("centre", (1e4, -1e6))
def test_std_far_from_zero(centre):
    values = centre + normal(50_000)
    assert measure(values).std == pytest.approx(values.double().std(correction=0).item(), rel=1e-6)


def misleading() -> torch.Tensor:
    """Values far from those at the beginnings of blocks."""
    values = 1e4 + normal(40_000)
    values[::4096] = 0
    values[8192:8300] = -1e5
    return values


VALUES = {
    "where the first ones mislead": misleading,
    **{f"of size {size}": lambda size=size: normal(10_000) * size
       for size in (1e30, 1e36, 1e-12, 1e-18, 1e-30, 1e-38, 1e-43)},
    **{f"{dtype} of size {size}": lambda dtype=dtype, size=size: (normal(5000).double() * size).to(dtype)
       for dtype in (torch.float64, torch.float16) for size in (1e-100, 1e-6, 1e100)},
    "small beside large": lambda: normal(20_000) * torch.logspace(-30, 30, 20_000),
    "masked": lambda: torch.where(normal(20_000) > 0, torch.finfo(torch.float32).min, 0.0),
    **{f"{count} {value}": lambda count=count, value=value: torch.full((count,), value)
       for count in (1, 5000) for value in (math.nan, math.inf)},
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_extremes_agree_with_numpy(name):
    values = VALUES[name]()
    assert_close(measure_raw(values), numpy_row(values))


@pytest.mark.parametrize("value", (0.0, 3.3, -1e-30, 5e36, 1e38, 1e-42))
def test_a_constant_has_no_deviation(value):
    values = torch.full((9000,), value)
    found = measure(values)
    assert found.std == 0 and found.mean == found.min == found.max == values[0].item()
    assert found.l2 == pytest.approx(abs(values[0].item()) * math.sqrt(9000), rel=1e-12)
    assert_close(measure_raw(values), numpy_row(values))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16, torch.float16), ids=str)
def test_nan_and_inf_are_counted_and_left_out(dtype):
    values = with_holes(normal(9000)).to(dtype)
    values[4096:8192] = math.nan
    row = measure_raw(values)
    assert row[layout.NAN] > 4096 and row[layout.INF] > 100 and row[layout.STD] < 2
    assert_close(row, numpy_row(values))


VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "permuted": lambda x: x.view(10, 30, 41).permute(2, 0, 1),
    "strided": lambda x: x[::3, 1::2],
    "rows": lambda x: x[7:90],
    "columns": lambda x: x[:, 3:40],
    "expanded": lambda x: x[:, None].expand(300, 5, 41),
    "one value": lambda x: x[0, 0].expand(70, 70),
    "channels last": lambda x: x.view(5, 4, 15, 41).contiguous(memory_format=torch.channels_last),
    "float16": lambda x: x.t().half(),
    "float64": lambda x: x.t().double(),
    "integers": lambda x: (x * 3).nan_to_num(7).int().t(),
}


@pytest.mark.parametrize("size", (64, 4096, 5000, module.BUCKET))
@pytest.mark.parametrize("view", VIEWS)
def test_neither_strides_nor_pieces_change_the_values(view, size, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", size)
    values = VIEWS[view](with_holes(normal(300, 41)))
    assert_close(measure_raw(values), numpy_row(values))


class Copies(TorchDispatchMode):
    """The number of elements of each tensor that torch allocates while this is active."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        for made in tree_leaves(results):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in inputs:
                self.sizes.append(made.untyped_storage().nbytes() // made.element_size())
        return results


def test_copies_are_small():
    for values in (normal(1000, 1000).t(), torch.zeros(1, dtype=torch.int8).expand(1_000_000)):
        with Copies() as copies:
            measure_raw(values)
        assert sum(copies.sizes) == 1_000_000 and max(copies.sizes) <= 1 << 16


def test_more_than_31_bits_of_elements():
    size = 2**31 + 5
    found = measure(torch.full((1,), 0.5).expand(size))
    assert (found.elements, found.positive, found.zero, found.std) == (size, size, 0, 0)
    assert found.l2 == pytest.approx(0.5 * math.sqrt(size), rel=1e-9) and found.mean == 0.5


@pytest.mark.parametrize("size", (100, module.BUCKET))
def test_complex_numbers_are_two(size, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", size)
    values = torch.view_as_complex(normal(50, 60, 2))
    plain = torch.view_as_real(values)
    for given, wanted in (
        (values, plain),
        (values.t(), plain.transpose(0, 1)),
        (values.conj(), plain * torch.tensor([1.0, -1.0])),
        (values.conj().t(), plain.transpose(0, 1) * torch.tensor([1.0, -1.0])),
        (values.conj().imag, -plain[..., 1]),
        (torch._neg_view(plain[..., 0].contiguous()), -plain[..., 0]),
    ):
        assert_close(measure_raw(given), numpy_row(wanted))
    assert_close(measure_raw(values[10:], offset=600), numpy_row(plain[10:], offset=1200))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_values_are_coalesced():
    values = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 0]]), torch.tensor([2.0, 3.0, -1.0]), (9,), check_invariants=True
    )
    found = measure(values)
    assert (found.elements, found.first) == (2, (-1, 5))
    assert measure(torch.tensor([[0.0, 2], [3, 0]]).to_sparse_csr()).first == (2, 3)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors")
def test_kinds_without_values_are_refused():
    with FakeTensorMode():
        fake = torch.zeros(3)
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    part = torch.zeros(30, 40).t()[3:]
    part.untyped_storage().resize_(0)
    later = {}
    if hasattr(torch, "float4_e2m1fn_x2"):  # from torch 2.8 on
        later["float4"] = torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for kind, tensor in {
        "FakeTensor": fake,
        "meta": torch.zeros(3, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        r"\(3,\) .* memory was released": freed,
        r"\(37, 30\) .* memory was released": part,
        **later,
    }.items():
        with pytest.raises(ValueError, match=kind):
            measure(tensor)
    with pytest.raises(ValueError, match="without memory"):
        torch.func.vmap(lambda x: measure(x) and x)(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="memory was released"):
        sampled(part, 500)
    with pytest.raises(ValueError, match="layout"):
        sampled(torch.eye(30).to_sparse(), 500)


def test_a_subclass_without_a_dispatch_is_its_values():
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):
            raise AssertionError("called")

    with torch._C.DisableTorchFunctionSubclass():
        tensor = normal(70, 60).as_subclass(Named)
    assert_close(measure_raw(tensor), numpy_row(normal(70, 60)))


class Elsewhere(torch.Tensor):
    """Says that it is not on the CPU."""

    is_cpu = False

    def as_subclass(self, kind):
        return self


@pytest.mark.parametrize("view", VIEWS)
def test_operators_of_torch_agree(view, monkeypatch):
    values = VIEWS[view](with_holes(normal(300, 41)))
    for size, offset in ((module.BUCKET, 0), (5000, 4096 * 3), (997, 70_001)):
        monkeypatch.setattr(module, "BUCKET", size)
        assert_close(measure_raw(values.as_subclass(Elsewhere), offset), numpy_row(values, offset), 1e-12)


@pytest.mark.parametrize("values", (torch.empty(0), torch.full((9,), math.nan), torch.tensor(1.5)), ids=str)
def test_operators_of_torch_agree_on_little(values):
    np.testing.assert_allclose(measure_raw(values.as_subclass(Elsewhere)), measure_raw(values), rtol=1e-12)


def test_devices_are_told_apart(monkeypatch):
    plain = normal(5000, 20)
    values, wanted = plain.as_subclass(Elsewhere), numpy_row(plain)
    with Copies() as whole:
        assert_close(measure_raw(values), wanted, 1e-12)  # operators of torch sum in float64
    monkeypatch.setattr(module, "BUCKET", 5000)
    with Copies() as copies:
        assert_close(measure_raw(values), wanted, 1e-12)
    assert max(copies.sizes) < 20_000 < 100_000 <= max(whole.sizes)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(measure_raw(plain), wanted, 1e-12)  # the kernels sum blocks in float32


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64, torch.float16), ids=str)
@pytest.mark.parametrize("cuts", ((4096, 8192), (1, 4097, 4100, 9000), (64, 64, 20_000), (5000,)))
def test_merged_shards_are_the_whole(cuts, dtype):
    values = with_holes(normal(30_000) + 3).to(dtype)
    edges = [0, *cuts, len(values)]
    rows = [measure_raw(values[a:b], offset=a) for a, b in zip(edges, edges[1:])]
    merged, wanted = merge(np.stack(rows)), numpy_row(values)
    merged[layout.FIRST_COLUMNS] = wanted[layout.FIRST_COLUMNS]  # those of the first part
    assert_close(merged, wanted)
    assert statistics_of(merged).elements == 30_000


def test_rows_of_many_tensors_merge_at_once():
    sizes = [(3, 50, 0), (0, 0, 7), (0, 0, 0), (5000, 2, 2)]
    rows = np.array([[measure_raw(with_holes(normal(size))) for size in part] for part in zip(*sizes)])
    merged = merge(rows)
    assert merged.shape == (len(sizes), WIDTH)
    for together, alone in zip(merged, rows.swapaxes(0, 1)):
        np.testing.assert_allclose(together, merge(alone), rtol=1e-14)
        present = alone[alone[:, layout.ELEMENTS] > 0]
        if len(present):
            kept = np.r_[: layout.FIRST_AT, layout.SKETCH_AT : WIDTH]
            np.testing.assert_allclose(together[kept], merge(present)[kept], rtol=1e-14)


@pytest.mark.parametrize("total", (4097, 12_288, 30_000, 1_000_003))
def test_samples_of_shards_are_the_sample_of_the_whole(total):
    values = normal(total, seed=total)
    sample, index = sampled(values)
    assert index == 0 and 1200 < len(sample) <= 4096
    stride = -(-total // len(sample))
    assert torch.equal(sample, values[::stride])
    cuts = [0, 1, total // 3, total // 3 + 2, total // 2, total]
    rows = []
    for a, b in zip(cuts, cuts[1:]):
        part, index = sampled(values[a:b], offset=a, total=total)
        rows.append(measure_raw(part, offset=index))
    merged, wanted = merge(np.stack(rows)), measure_raw(sample)
    merged[layout.FIRST_COLUMNS] = wanted[layout.FIRST_COLUMNS]  # those of the first part
    assert_close(merged, wanted)


def test_a_sample_is_in_the_order_of_the_elements():
    values = torch.arange(60_000.0).view(200, 300)
    for view in (
        values.t(),
        values[:, :150],
        values[:, None].expand(200, 4, 300),
        values.view(4, 50, 300).permute(1, 2, 0),
    ):
        assert torch.equal(sampled(view)[0], sampled(view.contiguous())[0])
        shard = sampled(view[1:], offset=7, total=99_999)
        again = sampled(view[1:].contiguous(), offset=7, total=99_999)
        assert torch.equal(shard[0], again[0]) and shard[1] == again[1]


def test_a_sample_meets_all_columns_and_a_small_tensor_is_its_own():
    values = torch.arange(768.0).expand(2048, 768).contiguous()
    assert len(sampled(values)[0].unique()) == 768
    small = normal(4096)
    assert sampled(small, offset=5, total=4096) == (small, 5)


def test_gradients_are_left_alone():
    leaf = normal(100, 70).requires_grad_()
    for values in (leaf, leaf.t(), leaf * 2, (leaf * 2).half(), (leaf * 2).t()):
        before, version, node = values.detach().clone(), values._version, values.grad_fn
        assert_close(measure_raw(values), numpy_row(before))
        assert_close(measure_raw(sampled(values, 500)[0]), numpy_row(sampled(before, 500)[0]))
        assert torch.equal(values, before) and values._version == version and values.grad_fn is node
    assert leaf.requires_grad and leaf.grad is None


def test_the_same_values_give_the_same_bits():
    values = with_holes(normal(600, 700))
    row = measure_raw(values)
    copied = torch.empty(600 * 700 + 3)[3:].view(600, 700).copy_(values)
    assert row.tobytes() == measure_raw(copied).tobytes() == measure_raw(values.clone()).tobytes()


@pytest.mark.parametrize("seed", range(8))
def test_distances_of_sketches_estimate_those_of_tensors(seed):
    a = normal(256, 192, seed=seed)
    b = a + 1e-3 * normal(256, 192, seed=seed + 100)
    row = a.clone()
    row[seed] += 0.1 * normal(192, seed=seed + 200)
    shuffled = a[torch.randperm(256, generator=torch.Generator().manual_seed(seed))]
    shifted = a + 0.01
    of_a = measure_raw(a)[layout.SKETCH_COLUMNS]
    for other in (b, row, shuffled, shifted):
        estimate = np.linalg.norm(of_a - measure_raw(other)[layout.SKETCH_COLUMNS])
        assert estimate == pytest.approx((a.double() - other.double()).norm().item(), rel=0.35)


def test_threads_do_not_share_state():
    tensors = [with_holes(normal(50_000 + seed, seed=seed)) for seed in range(4)]
    wanted = [measure_raw(tensor).tobytes() for tensor in tensors]
    failed = []

    def work(number: int) -> None:
        for _ in range(50):
            if measure_raw(tensors[number]).tobytes() != wanted[number]:
                failed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


WITHOUT_CACHE = """
import sys
import numba
jit, refused = numba.njit, []
def refusing(*args, cache=False, **kwargs):
    if cache:
        refused.append(args)
        raise RuntimeError("cannot cache function: no locator available")
    return jit(*args, **kwargs)
numba.njit = refusing
import numpy as np
import torch
from ort_zero.statistics.collect.tensor_statistics import measure_into
from ort_zero.statistics.rows import WIDTH
row = np.empty(WIDTH)
measure_into(row, torch.load(sys.argv[1], weights_only=True))
np.save(sys.argv[2], row)
sys.exit(not refused)
"""


def test_works_without_a_place_for_machine_code(tmp_path):
    values = normal(5000).bfloat16()
    torch.save(values, tmp_path / "values.pt")
    command = [sys.executable, "-c", WITHOUT_CACHE, str(tmp_path / "values.pt"), str(tmp_path / "row.npy")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_close(np.load(tmp_path / "row.npy"), numpy_row(values))


def test_importing_does_not_import_numba():
    code = "import sys, ort_zero.statistics.collect.tensor_statistics; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
