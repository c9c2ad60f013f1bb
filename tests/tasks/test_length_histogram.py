"""Histograms of lengths: few bins, whose widths are powers of two, so that they add up."""

from tasks.length_histogram import MOST_BINS, add_up, count_lengths


def test_short_samples_have_a_bin_for_each_length() -> None:
    assert count_lengths([1, 3, 3]) == {"tokens_per_bin": 1, "samples": [0, 1, 0, 2]}
    assert count_lengths([]) == {"tokens_per_bin": 1, "samples": [0]}


def test_bins_are_as_narrow_as_their_number_allows() -> None:
    assert count_lengths([31])["tokens_per_bin"] == 1
    found = count_lengths([0, 1, 32, 63])
    assert found["tokens_per_bin"] == 2
    assert len(found["samples"]) == MOST_BINS
    assert (found["samples"][0], found["samples"][16], found["samples"][31]) == (2, 1, 1)


def test_adding_up_gives_what_counting_all_at_once_gives() -> None:
    short, long = [1, 2, 5, 30], [40, 100, 517]

    assert add_up(map(count_lengths, (short, long))) == count_lengths(short + long)
    assert add_up([]) == {"tokens_per_bin": 1, "samples": []}
