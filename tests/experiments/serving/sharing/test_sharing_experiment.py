"""Page sharing: counted from page tables, from lengths, and by hand."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from experiments.framework import load_experiment
from experiments.harness import (
    PromptRequest,
    draw_lengths,
    make_stepper,
    measured_page_saving,
)
from experiments.serving.sharing import measurement, requests
from experiments.serving.sharing.picture import (
    NUM_SEQUENCES,
    PROMPT_TEXT,
    PageTableScenes,
)
from experiments.serving.sharing.requests import Client
from jaxkv import scheduling
from jaxkv.memory import NO_PAGE
from jaxkv.models import load_model
from jaxkv.progress import QUIET
from jaxkv.sampling import Sampling
from jaxkv.workloads import ALPACA, SHAREGPT, Lengths, Pair
from tests.support import smoke as support_smoke
from tests.support.impatience import Impatient, Stopping
from tests.support.smoke import measured_values, run

SIZE = measurement.CONFIGS["smoke"].page_size
ASK = Sampling(temperature=0.7)


@pytest.fixture(scope="module")
def model() -> str:
    return support_smoke.model(208)


@pytest.fixture(scope="module")
def result() -> measurement.Result:
    return run("sharing").result


@pytest.fixture(scope="module")
def client(model: str) -> Client:
    """Returns a client with the run's engine, whose programs are compiled."""
    loaded = load_model(model)
    bounds = measurement.ample_engine_config(measurement.CONFIGS["smoke"])
    engine = make_stepper(loaded, bounds, requests.step_with_tables)
    return Client(engine, loaded, ASK, QUIET)


def request_of(num: int, sampling: Sampling) -> PromptRequest:
    tokens = np.random.default_rng(num).integers(32, 127, num).tolist()
    return PromptRequest(bytes(tokens).decode(), tokens, sampling)


def served_by(client: Client, prompt_requests: list[PromptRequest], **how: Any) -> Any:
    done = client.serve(prompt_requests, **how)
    assert done is not None
    return done


def pages_by_hand(prompt: int, answer: int, n: int) -> tuple[list[int], list[int]]:
    """Returns logical and distinct pages of every step, counted with sets."""
    # one prefill
    logical = [-(-prompt // SIZE)]
    distinct = [-(-prompt // SIZE)]
    for places in range(prompt + 1, prompt + answer):
        held = [
            # A full page of the prompt is shared, any other page is not.
            {(None if (k + 1) * SIZE <= prompt else sample, k) for k in range(num)}
            for sample in range(n)
            for num in [-(-places // SIZE)]
        ]
        logical.append(sum(map(len, held)))
        distinct.append(len(set().union(*held)))
    return logical, distinct


@pytest.mark.parametrize(
    ("prompt", "answer", "n", "share"),
    [
        (33, 17, 2, 16 / 49),  # 15 steps of 3 pages, one of 4; 2 of them shared
        (16, 2, 4, 3 / 4 / 2),  # one step: a shared page, and one for the new token
        (15, 30, 8, 0.0),
        (64, 17, 2, 1 / 2 * 4 / 5),
    ],
)
def test_the_saving_worked_by_hand(
    prompt: int, answer: int, n: int, share: float
) -> None:
    lengths = Lengths(np.array([prompt]), np.array([answer]))
    assert measured_page_saving(lengths, n, 16) == pytest.approx(share)
    # Set counts agree, except for the prefill step.
    logical, distinct = pages_by_hand(prompt, answer, n)
    assert 1 - sum(distinct[1:]) / sum(logical[1:]) == pytest.approx(share)


@pytest.mark.parametrize("law", [ALPACA, SHAREGPT])
@pytest.mark.parametrize("num", [1, 16, 300])
def test_lengths_have_the_printed_means(law: Pair, num: int) -> None:
    lengths = draw_lengths(law, num, 1024, np.random.default_rng(3))
    assert lengths.prompt.mean() == pytest.approx(law.prompt.mean, rel=0.05)
    assert lengths.output.mean() == pytest.approx(law.output.mean, rel=0.05)
    assert (lengths.prompt + lengths.output).max() <= 1024
    assert lengths.prompt.min() >= 1
    assert lengths.output.min() >= 2
    with pytest.raises(ValueError, match="do not fit max_length=100"):
        draw_lengths(law, num, 100, np.random.default_rng(3))


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "answer", "n"), [(37, 20, 3), (32, 40, 8)])
def test_pages_of_every_step_equal_those_counted_by_hand(
    client: Client, prompt: int, answer: int, n: int
) -> None:
    ask = Sampling(n=n, max_tokens=answer, ignore_eos=True, prefix_cache=False)
    done = served_by(client, [request_of(prompt, ask)])
    logical, distinct = pages_by_hand(prompt, answer, n)
    assert done.logical_pages.tolist() == logical
    assert done.distinct_pages.tolist() == distinct
    # All but the last sample to write copy the prompt's partial page.
    assert done.num_copied == (n - 1 if prompt % SIZE else 0)
    assert done.num_rows.sum() == prompt + n * (answer - 1)
    assert {name: len(tokens) for name, tokens in done.tokens.items()} == {
        (0, sample): answer for sample in range(n)
    }


@pytest.mark.slow
def test_separate_requests_share_no_pages(client: Client) -> None:
    ask = Sampling(max_tokens=9, ignore_eos=True, prefix_cache=False)
    done = served_by(client, [request_of(40, ask)] * 5)
    np.testing.assert_array_equal(done.logical_pages, done.distinct_pages)
    assert done.prompt_rows.tolist() == [40] * 5
    assert done.num_cached.tolist() == [0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 5, 16, 40, None])
@pytest.mark.parametrize("beams", [False, True])
def test_a_prompt_is_computed_once_for_any_chunk_size(
    client: Client, chunk_size: int | None, beams: bool
) -> None:
    num = 4 if beams else 8
    fields: dict[str, Any] = {"beam_width": num} if beams else {}
    ask = Sampling(n=num, max_tokens=5, ignore_eos=True, prefix_cache=False, **fields)
    policy = scheduling.fcfs(chunk_size=chunk_size)
    prompt_requests = [request_of(n, ask) for n in (37, 3, 64)]
    done = served_by(client, prompt_requests, policy=policy)
    assert done.prompt_rows.tolist() == [37, 3, 64]
    assert done.num_rows.sum() == 37 + 3 + 64 + 3 * num * 4


@pytest.mark.slow
def test_savings_of_samples_follow_from_lengths(result: measurement.Result) -> None:
    samples = result.samples
    assert samples.lengths.tolist() == ["short", "short", "long", "long"]
    assert samples.num_sequences.tolist() == [4, 8, 4, 8]
    apart = samples.saved_share - samples.expected_share
    assert abs(apart).max() < 0.01
    assert (samples.saved_share[2:] > 0.2).all()
    assert not samples.num_preempted.any()


@pytest.mark.slow
def test_beams_save_more_than_samples(result: measurement.Result) -> None:
    assert result.beams.num_sequences.tolist() == [4, 4]
    for name in ("short", "long"):
        assert result.samples.saved(name, 4) < result.beams.saved(name, 4) < 3 / 4
    assert np.isnan(result.beams.expected_share).all()


@pytest.mark.slow
def test_prompts_of_eight_samples_are_prefilled_once(
    result: measurement.Result,
) -> None:
    readings = result.readings
    assert readings.chunk_size.tolist() == [3, 64]
    assert readings.num_sequences.tolist() == [8, 8]
    np.testing.assert_array_equal(readings.prompt_rows, readings.prompt_tokens)


@pytest.mark.slow
def test_a_common_prefix_is_found_and_changes_no_answer(
    result: measurement.Result,
) -> None:
    smoke = measurement.CONFIGS["smoke"]
    prefixes = result.prefixes
    assert prefixes.prefix_tokens.tolist() == [33]
    assert prefixes.num_cached.tolist() == [32]  # its full pages
    assert prefixes.num_different.tolist() == [0]
    without, with_ = prefixes.prompt_rows[0]
    assert without == prefixes.prompt_tokens[0]
    assert with_ == without - 32 * smoke.num_prefixed
    assert prefixes.steps[0, 1] < prefixes.steps[0, 0]
    assert 0.3 < prefixes.saved_share[0] < 1
    assert prefixes.rate.shape == (1, smoke.repeats, 2)


@pytest.mark.slow
def test_drawn_scenes_equal_the_page_tables(result: measurement.Result) -> None:
    picture = result.picture
    rows = NUM_SEQUENCES
    apart, samples, beams = picture.page_ids
    assert picture.logical_pages.tolist() == (
        (picture.page_ids != NO_PAGE).sum((1, 2)).tolist()
    )
    assert picture.logical_pages[0] == picture.pages[0]
    full = len(PROMPT_TEXT) // SIZE
    assert (samples[:, :full] == samples[0, :full]).all()
    private_pages = samples[:, full:][samples[:, full:] != NO_PAGE]
    assert np.unique(private_pages).size == private_pages.size
    assert (beams[:, :full] == beams[0, :full]).all()
    for i, table in enumerate((apart, samples, beams)):
        for row in range(rows):
            text = "".join(picture.text[i, row, :full])
            assert text == PROMPT_TEXT[: full * SIZE]
            held = picture.num_filled[i, row][table[row] != NO_PAGE]
            assert (held[:-1] == SIZE).all()
            assert held.sum() >= len(PROMPT_TEXT)
        # Sequences that share a page have equal text in it, and share earlier pages.
        for column, one, two in np.ndindex(table.shape[1], rows, rows):
            if table[one, column] == table[two, column] != NO_PAGE:
                assert (table[one, :column] == table[two, :column]).all()
                texts = picture.text[i, [one, two], column]
                assert texts[0] == texts[1]


@pytest.mark.slow
def test_claims_follow_from_the_result(result: measurement.Result) -> None:
    smoke_run = run("sharing")
    samples = result.samples
    measured = measured_values(smoke_run.claims)
    assert measured["8 answers to a prompt compute its tokens once"] == 1
    for name in ("short", "long"):
        row_mask = samples.lengths == name
        pairs = zip(
            samples.saved_share[row_mask], samples.expected_share[row_mask], strict=True
        )
        worst = max(100 * abs(saved - expected) for saved, expected in pairs)
        (closed,) = (x for x in measured if x.startswith(f"{name} prompts: n answers"))
        assert measured[closed] == pytest.approx(worst)
    saved = 100 * samples.saved("short", 4)
    assert measured["pages saved by 4 answers, short prompts"] == pytest.approx(saved)
    gains = [
        result.beams.saved(name, 4) - samples.saved(name, 4)
        for name in ("short", "long")
    ]
    beams = "beams save more pages than as many answers; smallest difference"
    assert measured[beams] == pytest.approx(100 * min(gains))
    (picture, *_) = smoke_run.metrics["pictures"]
    assert picture["logical_pages"] == picture["pages"]
    report = (smoke_run.folder / "report.md").read_text()
    assert "pages saved by sequences of one request" in report
    assert "requests that begin with the same text" in report
    assert "read_lines" in (smoke_run.folder / "figure.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("label", ["parallel sampling", "picture"])
def test_a_stopped_run_keeps_finished_settings(model: str, label: str) -> None:
    config = dataclasses.replace(measurement.CONFIGS["smoke"], model=model)
    result = measurement.run(config, Impatient(label))
    assert len(result.samples.lengths) == (label == "parallel sampling")
    assert len(result.prefixes.prefix_tokens) == 0
    measured = measured_values(measurement.claims(result))
    samples = result.samples
    if label == "parallel sampling":
        saved = measured.pop("pages saved by 4 answers, short prompts")
        assert saved == pytest.approx(100 * samples.saved_share[0])
        apart = abs(samples.saved_share[0] - samples.expected_share[0])
        assert [*measured.values()] == pytest.approx([100 * apart])
    else:
        assert not measured
    (study, _) = load_experiment("sharing").studies
    assert study.metrics(result)["prefixes"] == []
    assert len(study.report_parts(result)) >= 1
    nothing = dataclasses.replace(result, picture=PageTableScenes.of([]))
    for part in (result, nothing):
        assert support_smoke.draw(study, part)


@pytest.mark.slow
def test_a_stopped_client_leaves_an_empty_engine(client: Client) -> None:
    ask = Sampling(n=8, max_tokens=60, ignore_eos=True)
    requests = [request_of(50, ask)] * 3
    assert client._replace(progress=Stopping(0)).serve(requests) is None
    again = served_by(client, requests[:1])
    assert again.num_cached.tolist() == [0]
    client.engine.clear()


@pytest.mark.slow
def test_settings_serve_the_same_requests(client: Client) -> None:
    """Requests do not depend on the number of samples, so savings are comparable."""
    kinds = {"short": Lengths(np.array([20, 9]), np.array([6, 12]))}
    savings = requests.serve_groups(client, kinds, (2, 3), beams=False)
    assert savings.mean_prompt.tolist() == [14.5] * 2
    assert savings.mean_answer.tolist() == [9.0] * 2
    assert savings.saved("short", 3) > savings.saved("short", 2) > 0
    assert np.isnan(savings.saved("long", 2))


def test_the_model_must_be_long_enough(model: str) -> None:
    with pytest.raises(ValueError, match="max_length=1024 must be at most"):
        measurement.run(measurement.Config(model=model))
    smoke = dataclasses.replace(
        measurement.CONFIGS["smoke"], model=model, length_scale=1.0
    )
    with pytest.raises(ValueError, match="do not fit max_length=208"):
        measurement.run(smoke)
