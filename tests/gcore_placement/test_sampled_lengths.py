"""Lengths of responses from what a run records of a step."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from gcore_placement import PlacementError, SampledLengths, blend


@pytest.mark.parametrize(
    ("mean", "longest", "num_cut"), [(40.2, 210, 0), (90.0, 256, 5), (7.0, 7, 0), (1.3, 60, 0)]
)
def test_a_steps_lengths_have_its_sum_and_maximum(mean: float, longest: int, num_cut: int) -> None:
    step = SampledLengths(number=200, mean=mean, longest=longest, num_cut=num_cut, limit=256)
    lengths = step.spread(sigma=0.8)
    assert lengths.size == 200
    assert lengths.sum() == round(200 * mean)
    assert (lengths.min() >= 1, lengths.max()) == (True, longest)
    assert (lengths == longest).sum() >= max(1, num_cut)


def test_few_lengths() -> None:
    one = SampledLengths(number=1, mean=9.0, longest=9, num_cut=0, limit=256)
    assert one.spread(sigma=0.8).tolist() == [9]
    assert replace(one, number=2, mean=6.0).spread(sigma=0.0).tolist() == [3, 9]
    median, _ = SampledLengths.fit([replace(one, number=8, mean=256.0, longest=256, num_cut=8)])
    assert median >= 250
    with pytest.raises(
        PlacementError, match=r"steps is \[\]; expected at least one step with responses"
    ):
        SampledLengths.fit([replace(one, number=0)])


@pytest.mark.parametrize("limit", [100_000, 300])
def test_lengths_are_recognised(limit: int) -> None:
    random = np.random.default_rng(0)
    drawn = np.clip(np.exp(np.log(150) + 0.7 * random.standard_normal((200, 64))), 1, limit).round()
    steps = [
        SampledLengths(
            number=64,
            mean=d.mean(),
            longest=int(d.max()),
            num_cut=int((d == limit).sum()),
            limit=limit,
        )
        for d in drawn
    ]
    median, sigma = SampledLengths.fit(steps)
    assert median == pytest.approx(150, rel=0.03)
    assert sigma == pytest.approx(0.7, rel=0.05)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_blended_draws_share_a_part_of_their_variance(share: float) -> None:
    uniforms = np.random.default_rng(0).uniform(size=(4000, 3))
    pairs = np.array(
        [
            [blend(prompt, own, share) for own in (first, second)]
            for prompt, first, second in uniforms
        ]
    )
    assert np.quantile(pairs, [0.1, 0.5, 0.9]) == pytest.approx([0.1, 0.5, 0.9], abs=0.02)
    normals = np.vectorize(NormalDist().inv_cdf)(pairs)
    assert np.corrcoef(normals.T)[0, 1] == pytest.approx(share, abs=0.05)
