"""partita.attention against torch's own: samples of the wheel, a grid, shapes, masks (M-ATT-1, M-ATT-5, M-ATT-6)."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import partita
from partita import support
from tests.attention.operands import assert_same
from tests.tolerances import assert_no_worse_than_naive

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, while it imports its test helpers
    from torch.testing._internal.common_methods_invocations import op_db

SDPA = F.scaled_dot_product_attention


def samples(dtype):
    (op,) = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    torch.manual_seed(0)
    return list(op.sample_inputs("cpu", dtype, requires_grad=True))


def leaves(*tensors):
    return [x for x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]


def widened(x):
    same = not isinstance(x, torch.Tensor) or not x.is_floating_point()
    return x if same else x.detach().double().requires_grad_(x.requires_grad)


def value_and_gradients(function, arguments, options, weight=None):
    out = function(*arguments, **options)
    weight = torch.ones_like(out) if weight is None else weight.to(out.dtype)
    return out.detach(), torch.autograd.grad((out * weight).sum(), leaves(*arguments, *options.values()))


def results(arguments, options, weight=None):
    """Output and gradients three times: ours, torch's math kernel's, and its in float64."""
    with sdpa_kernel(SDPBackend.MATH):
        theirs = value_and_gradients(SDPA, arguments, options, weight)
        wide = {name: widened(x) for name, x in options.items()}
        truth = value_and_gradients(SDPA, [widened(x) for x in arguments], wide, weight)
    ours = value_and_gradients(partita.attention, arguments, options, weight)
    found = list(zip([ours[0], *ours[1]], [theirs[0], *theirs[1]], [truth[0], *truth[1]], strict=True))
    for mine, naive, _ in found:
        assert mine.dtype == naive.dtype and mine.shape == naive.shape
    return found


def assert_matches(arguments, options, weight=None):
    """Values and gradients: exact in float64, and below it at most twice as wrong as torch's math kernel."""
    for mine, naive, exact in results(arguments, options, weight):
        if mine.dtype == torch.float64:
            torch.testing.assert_close(mine, naive, atol=1e-9, rtol=1e-9)
        else:
            assert_no_worse_than_naive(mine, naive, exact, ulps=16)


def test_samples_of_the_wheel_are_no_less_accurate_than_torch_in_float32():
    """Over all samples together: in one tiny sample (scores up to 200) the order of summation decides by luck."""
    ours, theirs = {}, {}
    for sample in samples(torch.float32):
        if sample.kwargs.get("dropout_p", 0.0) == 0:
            for place, (mine, naive, exact) in enumerate(results((sample.input, *sample.args), sample.kwargs)):
                ours[place] = ours.get(place, 0.0) + (mine.double() - exact).square().sum().item()
                theirs[place] = theirs.get(place, 0.0) + (naive.double() - exact).square().sum().item()
    assert len(ours) >= 4
    for place in ours:
        assert ours[place] ** 0.5 <= 2 * theirs[place] ** 0.5, place


def test_samples_of_the_wheel_with_dropout_in_distribution():
    """Mean over many draws equals the undropped output; the expected square has torch's closed form."""
    count = 0
    for sample in samples(torch.float64):
        p = sample.kwargs.get("dropout_p", 0.0)
        if p == 0:
            continue
        arguments = [x.detach() for x in (sample.input, *sample.args)]
        options = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in sample.kwargs.items()}
        plain = {**options, "dropout_p": 0.0}
        exact = SDPA(*arguments, **plain)
        draws = torch.stack([partita.attention(*arguments, **options) for _ in range(60)])
        # Var = p/(1-p) sum_j w_j^2 v_j^2 <= p/(1-p) max|v|^2: five standard errors of the mean
        bound = 5 * (p / (1 - p) / 60) ** 0.5 * arguments[2].abs().max()
        assert (draws.mean(0) - exact).abs().max() < bound
        assert draws.var(0).max() > 0
        count += 1
    assert count >= 12


SHAPES = [(1, 1, 1), (7, 7, 8), (5, 9, 3), (9, 5, 4)]  # n_query, n_key, dim
MASKS = ["none", "causal", "bool", "float", "float-grad", "rows-hidden"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_the_grid_agrees_with_torchs_math_kernel(dtype, mask):
    for (n_query, n_key, dim), dim_value, batch in itertools.product(SHAPES, (None, 6), [(), (2,), (2, 3)]):
        torch.manual_seed(n_query + 10 * n_key)
        make = {"dtype": dtype, "requires_grad": True}
        q = torch.randn(*batch, n_query, dim, **make)
        k = torch.randn(*batch, n_key, dim, **make)
        v = torch.randn(*batch, n_key, dim_value or dim, **make)
        options = {}
        if mask == "causal":
            options["is_causal"] = True
        elif mask == "bool":
            options["attn_mask"] = torch.rand(n_query, n_key) < 0.6
        elif mask.startswith("float"):
            options["attn_mask"] = torch.randn(n_query, n_key, dtype=dtype).requires_grad_(mask == "float-grad")
        elif mask == "rows-hidden":
            options["attn_mask"] = (torch.rand(n_query, n_key) < 0.6) & (torch.arange(n_query) % 2 == 1)[:, None]
        assert_matches((q, k, v), options, torch.randn(*batch, n_query, dim_value or dim))


@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_two_to_five_dimensions_and_broadcast_batches(dims):
    batch = (2, 1, 3)[: dims - 2]
    other = (1, 4, 3)[: dims - 2]
    q = torch.randn(*batch, 6, 4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(*other, 7, 4, dtype=torch.float64, requires_grad=True)
    v = torch.randn(*other, 7, 5, dtype=torch.float64, requires_grad=True)
    assert_matches((q, k, v), {})


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 3)])
def test_grouped_queries_share_keys(heads):
    many, few = heads
    q = torch.randn(2, many, 5, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, few, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert_matches((q, k, v), {"enable_gqa": True, "attn_mask": torch.rand(2, 1, 5, 7) < 0.7})
    assert_matches((q, k, v), {"enable_gqa": True, "is_causal": True})


def test_rows_that_see_nothing_are_zero_with_zero_gradient():
    q, k, v = (torch.randn(2, 5, 4, requires_grad=True) for _ in range(3))
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[3] = False
    out, stats = partita.attention(q, k, v, keep, return_stats=True)
    assert (out[:, 3] == 0).all() and (stats.entropy[:, 3] == 0).all() and (stats.visible[:, 3] == 0).all()
    (out.sum() + stats.entropy.sum()).backward()
    assert (q.grad[:, 3] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_a_masked_key_cannot_poison_and_a_visible_one_poisons_its_rows():
    """torch's own gives nan here (pytorch#101967)."""
    q, k, v = (torch.randn(1, 4, 4) for _ in range(3))
    k[:, 3], v[:, 2] = torch.nan, torch.inf
    out = partita.attention(q, k, v, is_causal=True)
    assert out[:, :2].isfinite().all() and not out[:, 2:].isfinite().all(-1).any()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    partita.attention(q, k, v, is_causal=True, support=support.lengths(2)).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert (k.grad[:, 2:] == 0).all() and (v.grad[:, 2:] == 0).all()


def test_scale_may_be_a_number_a_tensor_per_head_or_per_row():
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    torch.testing.assert_close(partita.attention(q, k, v, scale=0.3), SDPA(q, k, v, scale=0.3))
    for shape in ((3, 1), (2, 3, 5), (5,), ()):
        scale = torch.rand(shape, dtype=torch.float64, requires_grad=True)
        want = SDPA(q * scale[..., None] if shape else q * scale, k, v, scale=1.0)
        assert_same(partita.attention(q, k, v, scale=scale), want, (scale,))


def test_a_sink_takes_mass_and_leaves_the_statistics_alone():
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sink = torch.randn(3, dtype=torch.float64, requires_grad=True)
    got, stats = partita.attention(q, k, v, sink=sink, return_stats=True)
    scores = q @ k.mT / 2
    column = sink[:, None, None].expand(2, 3, 5, 1)
    want = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    assert_same(got, want, (q, k, v, sink))
    torch.testing.assert_close(stats.log_partition, scores.logsumexp(-1))


def test_decoding_with_a_cache_equals_the_whole_sequence():
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    whole = partita.attention(q, k, v, is_causal=True)
    step = partita.attention(q[..., 6:, :], k, v, support=support.causal("bottom-right"))
    torch.testing.assert_close(step, whole[..., 6:, :])


def test_a_float_mask_adds_to_a_bias():
    q, k, v = (torch.randn(6, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(6, 6, dtype=torch.float64)
    want = (2 * torch.tanh(q @ k.mT / 2 / 2) + bias).softmax(-1) @ v
    torch.testing.assert_close(partita.attention(q, k, v, bias / 2, bias=bias / 2, softcap=2.0), want)


def test_autocast_gives_torchs_dtype_and_nearly_its_numbers():
    q, k, v = (torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = SDPA(q, k, v), partita.attention(q, k, v)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    ours.float().sum().backward()
    assert q.grad.dtype == torch.float32
