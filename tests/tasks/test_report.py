"""What the report colors: how each token of a text came about, which parts of a sample are supervised."""

from tasks.report import spans, token_kinds


def test_tokens_are_accepted_corrected_or_the_verifiers_own() -> None:
    # 3 drafted in each round: two accepted and one refused, all accepted, none accepted
    kinds = token_kinds([2, 3, 0], 9, 3)

    assert kinds == ["own", *["accepted"] * 2, "corrected", *["accepted"] * 3, "own", "corrected"]


def test_a_text_that_ends_within_a_round_ends_there() -> None:
    assert token_kinds([3], 2, 3) == ["own", "accepted"]
    assert token_kinds([], 1, 3) == ["own"]


def test_supervised_spans_are_told_from_the_rest() -> None:
    assert spans("ask⟦answer⟧ask⟦more⟧") == [
        ("ask", False), ("answer", True), ("ask", False), ("more", True)
    ]  # fmt: skip
