"""Scales of post-training quantisation: by hand, by brute force, and as ModelOpt's calibrators."""

import modelopt.torch.quantization as mtq
import pytest
import torch
from modelopt.torch.quantization.calib.mse import NVFP4MSECalibrator
from modelopt.torch.quantization.model_calib import _LocalHessianAccumulator

from megatron_trace.formats import decode, unpack_codes
from megatron_trace.formats.minifloat import E2M1, nearest_values
from megatron_trace.ptq.hessian import LocalHessian
from megatron_trace.ptq.recipes import RECIPES
from megatron_trace.ptq.weights import block_errors, four_over_six, scale_search, vanilla


def row(*blocks):
    """Gives a matrix of one row, whose blocks begin with these values and go on with zeros."""
    weight = torch.zeros(1, 16 * len(blocks))
    for number, values in enumerate(blocks):
        weight[0, 16 * number : 16 * number + len(values)] = torch.tensor(values)
    return weight


def hessian(*diagonals):
    """Gives diagonal Hessians of the same shape as `row`'s blocks."""
    matrices = torch.zeros(len(diagonals), 16, 16)
    for number, values in enumerate(diagonals):
        for place, value in enumerate(values):
            matrices[number, place, place] = value
    return matrices


def bytes_of(packed):
    return packed.scale_bytes[0].tolist()


def codes_of(packed, count, block=0):
    return unpack_codes(packed.packed_codes)[0, 16 * block : 16 * block + count].tolist()


def values_of(packed):
    return decode(unpack_codes(packed.packed_codes), packed.scale_bytes, packed.global_scale)


def random_matrix(rows=24, columns=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    inputs = torch.randn(40, columns, generator=generator) @ torch.randn(
        columns, columns, generator=generator
    )
    local = LocalHessian()
    local.add(inputs)
    metric = local.mean()
    assert metric is not None
    return weight.bfloat16(), metric, inputs


def test_vanilla_block_by_hand():
    # g = 12 / 2688, so that the block scale is 448 and the codes are w / 2: 6, .5, -1.5, and .25,
    # which lies between 0 and .5 and goes to the even 0.
    packed = vanilla(row([12.0, 1.0, -3.0, 0.5]))
    assert packed.global_scale.item() == pytest.approx(12 / 2688)
    assert bytes_of(packed) == [0x7E]
    assert codes_of(packed, 4) == [7, 1, 8 + 3, 0]


def test_four_over_six_block_by_hand():
    # g = 6 / 1536 = 2^-8. The second block with its 4 at 6 has the scale 176 / 256 = .6875 and
    # becomes 4.125 and 2.75; with its 4 at 4 the scale is 1 and nothing is lost.
    packed = four_over_six(row([6.0], [4.0, 3.0]))
    assert packed.global_scale.item() == 2**-8
    assert bytes_of(packed) == [0x78, 0x78]
    assert codes_of(packed, 2, block=1) == [6, 5]
    assert bytes_of(vanilla(row([10.5], [4.0, 3.0]))) == [0x7E, 0x73]


@pytest.mark.parametrize(
    ("diagonal", "byte", "values"),
    [
        # Under the scale 1 the 6 stays and the 5, a tie, becomes 4; under 1.25 both become 5.
        ([1.0, 0.0], 0x78, [6.0, 4.0]),
        ([0.0, 1.0], 0x7A, [5.0, 5.0]),
    ],
)
def test_h_scale_keeps_the_weight_that_counts_by_hand(diagonal, byte, values):
    # g = 10.5 / 2688 = 2^-8: a block scale of 256 is a scale of 1.
    weight = row([10.5], [6.0, 5.0])
    packed = scale_search(weight, hessian([1.0], diagonal))
    assert packed.global_scale.item() == 2**-8
    assert bytes_of(packed) == [0x7E, byte]
    assert values_of(packed)[0, 16:18].tolist() == values


def test_a_hessian_beside_its_diagonal_counts_by_hand():
    # Both inputs are always equal, so that the errors of 6 and 5 must cancel. Scales below 1 cut
    # the 6; from 1 to 1.75 (the largest) they become 6 + 4, 6.75 + 4.5, 5 + 5, 5.5 + 5.5, 6 + 6,
    # 6.5 + 4.875, 7 + 5.25: 5.5 + 5.5 of the scale 1.375 keeps the sum.
    both = torch.zeros(2, 16, 16)
    both[0, 0, 0] = 1.0
    both[1, :2, :2] = 1.0
    packed = scale_search(row([10.5], [6.0, 5.0]), both)
    assert values_of(packed)[0, 16:18].tolist() == [5.5, 5.5]
    assert bytes_of(packed) == [0x7E, 0x7B]


def test_h_scale_is_the_best_of_all_scales_by_brute_force():
    weight, metric, _ = random_matrix(rows=3)
    packed = scale_search(weight, metric)
    blocks = weight.double().view(3, 4, 16)
    for at in ((0, 0), (1, 2), (2, 3)):
        errors = {}
        for byte in range(1, 127):
            scale = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            effective = (scale * packed.global_scale).view(1, 1)
            rounded = nearest_values(E2M1, blocks[at].float().view(1, 1, 16), effective).double()
            dw = (rounded - blocks[at]).view(16)
            errors[byte] = float(dw @ metric[at[1]].double() @ dw)
        assert errors[int(packed.scale_bytes[at])] <= min(errors.values()) * (1 + 1e-5)


def test_h_scale_is_never_worse_than_the_others_in_its_own_measure():
    weight, metric, _ = random_matrix(rows=64)
    best = block_errors(weight, scale_search(weight, metric), metric)
    plain = block_errors(weight, vanilla(weight), metric)
    squared = block_errors(weight, scale_search(weight), metric)
    # The errors are FP32 sums in another order than those that decided.
    assert (best <= plain * (1 + 1e-4) + 1e-12).all()
    assert (best <= squared * (1 + 1e-4) + 1e-12).all()
    assert best.sum() < 0.8 * plain.sum()  # 0.58 measured


def test_a_better_scale_makes_the_output_of_the_matrix_better():
    weight, metric, inputs = random_matrix(rows=64)

    def output_error(packed):
        return ((values_of(packed) - weight.float()) @ inputs.T).square().sum()

    assert output_error(scale_search(weight, metric)) < output_error(vanilla(weight))


def test_h_scale_with_the_identity_is_the_plain_squared_error_choice():
    weight, _, _ = random_matrix()
    identity = torch.eye(16).expand(4, 16, 16)
    assert torch.equal(scale_search(weight, identity).scale_bytes, scale_search(weight).scale_bytes)


def test_squared_error_choice_is_never_worse_than_vanilla():
    weight, _, _ = random_matrix(seed=1)
    best, plain = (block_errors(weight, rule(weight)) for rule in (scale_search, vanilla))
    assert (best <= plain).all()


def test_blocks_whose_inputs_are_always_zero_are_chosen_by_squared_error():
    weight, metric, _ = random_matrix()
    metric[1] = 0
    packed, plain = scale_search(weight, metric), scale_search(weight)
    assert torch.equal(packed.scale_bytes[:, 1], plain.scale_bytes[:, 1])
    assert not torch.equal(packed.scale_bytes[:, 0], plain.scale_bytes[:, 0])


@pytest.mark.parametrize("rule", [vanilla, four_over_six, scale_search])
def test_blocks_of_zeros_have_byte_0_and_stay_zero(rule):
    for weight in (row([1.0], [], [2.0]), torch.zeros(2, 32)):
        packed = rule(weight)
        empty = weight.view(len(weight), -1, 16).abs().amax(-1) == 0
        assert torch.equal(packed.scale_bytes == 0, empty)
        assert torch.equal(values_of(packed) == 0, weight == 0)


def test_a_large_matrix_in_parts_is_that_of_its_rows(monkeypatch):
    weight, metric, _ = random_matrix()
    whole = scale_search(weight, metric)
    monkeypatch.setattr("megatron_trace.ptq.weights._VALUES_AT_A_TIME", 64 * 7)
    parts = scale_search(weight, metric)
    assert torch.equal(parts.scale_bytes, whole.scale_bytes)
    assert torch.equal(parts.packed_codes, whole.packed_codes)


@pytest.mark.parametrize("metric", [torch.zeros(3, 16, 16), torch.full((4, 16, 16), torch.nan)])
def test_a_hessian_that_cannot_be_used_is_refused(metric):
    weight, _, _ = random_matrix()
    with pytest.raises(ValueError, match="must be finite"):
        scale_search(weight, metric)


def test_local_hessian_is_the_diagonal_of_the_whole_in_blocks():
    _, metric, inputs = random_matrix()
    whole = inputs.T @ inputs / len(inputs)
    blocks = torch.stack([whole[n : n + 16, n : n + 16] for n in range(0, 64, 16)])
    torch.testing.assert_close(metric, blocks)


@pytest.mark.parametrize("weighted", [False, True])
def test_scales_are_those_of_modelopts_calibrator(weighted):
    weight, metric, inputs = random_matrix(rows=64)
    scale = vanilla(weight).global_scale
    accumulator = _LocalHessianAccumulator(64, 64, 16)
    accumulator.accumulate(inputs)
    torch.testing.assert_close(accumulator.normalized_hessian(), metric)

    def quantise(x, amax):
        effective = (amax / (6 * scale)).to(torch.float8_e4m3fn).float() * scale
        return nearest_values(E2M1, x[:, None], effective[:, None])[:, 0]

    blocks = weight.float().view(-1, 16)
    calibrator = NVFP4MSECalibrator(
        blocks.abs().amax(-1),
        weight.abs().amax(),
        axis=0,
        quant_func=quantise,
        error_func=accumulator.build_error_func() if weighted else None,
    )
    calibrator.collect(blocks)
    amax = calibrator.compute_amax()
    assert amax is not None
    theirs = (amax / (6 * scale)).to(torch.float8_e4m3fn).view(torch.uint8).view(64, 4)
    ours = scale_search(weight, metric if weighted else None).scale_bytes
    assert torch.equal(ours, theirs)


def test_recipes_are_those_of_modelopts_configurations():
    algorithms = {name: getattr(mtq, r.modelopt_config)["algorithm"] for name, r in RECIPES.items()}
    assert algorithms["vanilla"] == "max"
    assert algorithms["4over6"] | {"method": "mse"} == {
        "method": "mse",
        "fp8_scale_sweep": False,
        "start_multiplier": 1.0,
        "stop_multiplier": 1.5,
        "step_size": 0.5,
    }
    assert algorithms["mse"] == {"method": "mse", "fp8_scale_sweep": True}
    assert algorithms["h_scale"] == {"method": "local_hessian", "fp8_scale_sweep": True}


def test_a_recipe_without_the_hessians_that_it_needs_is_refused():
    with pytest.raises(ValueError, match="calibrate_with_hessians"):
        RECIPES["h_scale"].rule()
