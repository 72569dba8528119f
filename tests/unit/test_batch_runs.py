"""The files of `tidegate run-batch`: what is checked before the run, and how a run continues."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from random import Random
from typing import Any

import pytest

from protocol.shared.batch_retries import MAX_TRIES, LineOutcome, RetryPolicy, failure_of
from protocol.shared.batches import BatchResponse, BatchResult, digest_of_id, json_of
from tests.support.batches import batch_line, completion_lines, jsonl, results_in
from tools.batches.input import BatchInput, InputFacts
from tools.batches.output import STATE_SUFFIX, BatchOutput
from tools.batches.progress import RunProgress, duration, tokens_of
from tools.failure import Failure


def written(folder: Path, text: str, name: str = "in.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def checked(path: Path) -> InputFacts:
    with BatchInput(path) as source:
        return source.check()


def response(status: int = 200, body: Any = None) -> BatchResponse:
    return BatchResponse(status, "r", json_of(json.dumps(body or {}).encode()))


def result(name: str, status: int = 200) -> BatchResult:
    return BatchResult(f"id-{name}", name, response=response(status))


def resumed(path: Path, facts: InputFacts, *append: BatchResult) -> set[bytes]:
    """Continue an output, append results, and return the ids that had results before."""
    with BatchOutput(path) as output:
        done = output.resume(facts)
        for each in append:
            output.append(each)
    return set(done)


def ids(*names: str) -> set[bytes]:
    return {digest_of_id(name) for name in names}


# ---- the input


def test_the_check_counts_lines_and_models_and_skips_blank_lines(tmp_path: Path) -> None:
    lines = [batch_line(str(n), {"model": f"m{n % 2}"}) for n in range(5)]
    path = written(tmp_path, "\n" + jsonl(lines) + "  \n\n" + jsonl(lines[:0]))
    facts = checked(path)
    assert (facts.num_lines, facts.models) == (5, ["m0", "m1"])
    assert facts.ids == ids(*map(str, range(5)))
    with BatchInput(path) as source:
        left = [line.custom_id for line in source.lines(ids("0", "3"))]
    assert left == ["1", "2", "4"]


def test_the_last_line_needs_no_line_break(tmp_path: Path) -> None:
    assert checked(written(tmp_path, jsonl(completion_lines(3)).rstrip())).num_lines == 3


def test_malformed_lines_are_listed_with_their_numbers(tmp_path: Path) -> None:
    text = jsonl([batch_line("a", {})]) + "\n{}\n" * 12
    with pytest.raises(Failure) as refused:
        checked(written(tmp_path, text))
    message = str(refused.value)
    assert "line 3: custom_id: this field is required" in message
    assert "and 2 more" in message
    assert refused.value.exit_code == 2


def test_ids_that_repeat_are_listed_with_all_their_lines(tmp_path: Path) -> None:
    lines = [batch_line(name, {}) for name in ("a", "b", "a", "c", "b", "a")]
    with pytest.raises(Failure) as refused:
        checked(written(tmp_path, jsonl(lines)))
    assert "lines 1, 3, 6: the same custom_id 'a'" in str(refused.value)
    assert "lines 2, 5: the same custom_id 'b'" in str(refused.value)


def test_an_empty_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="has no lines"):
        checked(written(tmp_path, "\n\n"))


def test_a_pipe_is_refused_because_the_input_is_read_twice() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    try:
        with pytest.raises(Failure, match="is a pipe") as refused:
            BatchInput(Path(f"/dev/fd/{reader}"))
    finally:
        os.close(reader)
    assert refused.value.exit_code == 2


def test_an_input_that_changes_during_the_run_ends_it(tmp_path: Path) -> None:
    path = written(tmp_path, jsonl(completion_lines(3)))
    with BatchInput(path) as source:
        source.check()
        with path.open("a") as file:
            file.write(jsonl([batch_line("new", {})]))
        with pytest.raises(Failure, match="was changed during the run"):
            list(source.lines(set()))


# ---- the output


@pytest.fixture
def facts(tmp_path: Path) -> InputFacts:
    names = [batch_line(name, {}) for name in "abcd"]
    return checked(written(tmp_path, jsonl(names)))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_a_run_continues_after_the_results_in_its_output(output: Path, facts: InputFacts) -> None:
    assert resumed(output, facts, result("a"), result("c", 400)) == set()
    with BatchOutput(output) as continued:
        assert continued.resume(facts) == ids("a", "c")
        assert (continued.num_done, continued.num_failed) == (2, 1)


@pytest.mark.parametrize("cut", range(1, len(result("b").to_line()) + 1))
def test_a_torn_last_line_is_cut_off_and_sent_again(
    output: Path, facts: InputFacts, cut: int
) -> None:
    resumed(output, facts, result("a"), result("b"))
    os.truncate(output, output.stat().st_size - cut)
    assert resumed(output, facts, result("b")) == ids("a")
    assert [each["custom_id"] for each in results_in(output)] == ["a", "b"]


def test_blocks_of_zeros_at_the_end_are_cut_off(output: Path, facts: InputFacts) -> None:
    """They are left if the machine loses power before the last results reach the disk."""
    resumed(output, facts, result("a"))
    with output.open("ab") as file:
        file.write(bytes(100) + b"\n" + bytes(30))
    assert resumed(output, facts, result("b")) == ids("a")
    assert [each["custom_id"] for each in results_in(output)] == ["a", "b"]


def test_unreadable_lines_before_results_are_refused(output: Path, facts: InputFacts) -> None:
    resumed(output, facts, result("a"))
    with output.open("ab") as file:
        file.write(b"note to self\n\n" + result("b").to_line())
    with pytest.raises(Failure, match="line 2 is not a result"):
        resumed(output, facts)


@pytest.mark.parametrize(
    ("extra", "problem"), [("x", "line 2 has an id that"), ("a", "line 2 repeats the id")]
)
def test_results_of_no_line_and_second_results_are_refused(
    output: Path, facts: InputFacts, extra: str, problem: str
) -> None:
    resumed(output, facts, result("a"))
    with output.open("ab") as file:
        file.write(result(extra).to_line())
    with pytest.raises(Failure, match=problem):
        resumed(output, facts)


def test_an_output_continues_only_with_its_own_input(
    tmp_path: Path, output: Path, facts: InputFacts
) -> None:
    resumed(output, facts, result("a"))
    other = checked(written(tmp_path, jsonl(completion_lines(2)), "other.jsonl"))
    with pytest.raises(Failure, match="the input has changed"):
        resumed(output, other)
    assert len(results_in(output)) == 1


def test_a_file_that_is_no_output_of_a_run_is_never_written(
    output: Path, facts: InputFacts
) -> None:
    output.write_text("precious\n")
    with pytest.raises(Failure, match="is not an output of run-batch"):
        resumed(output, facts)
    assert output.read_text() == "precious\n"


def test_a_damaged_state_file_is_reported(output: Path, facts: InputFacts) -> None:
    resumed(output, facts)
    output.with_name(output.name + STATE_SUFFIX).write_text("{")
    with pytest.raises(Failure, match=r"cannot read .*state"):
        resumed(output, facts)


def test_two_runs_cannot_share_an_output(output: Path, facts: InputFacts) -> None:
    with BatchOutput(output), pytest.raises(Failure, match="another run writes to"):
        BatchOutput(output)
    assert resumed(output, facts) == set()


def test_nothing_is_appended_after_the_output_was_closed(output: Path, facts: InputFacts) -> None:
    with BatchOutput(output) as closed:
        closed.resume(facts)
        closed.append(result("a"))
    closed.append(result("b"))
    assert [each["custom_id"] for each in results_in(output)] == ["a"]


def test_a_full_disk_ends_the_run_and_leaves_whole_lines(output: Path, facts: InputFacts) -> None:
    """A limit on the size of files stands for the full disk. It cuts the second result."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = len(result("a").to_line())
    with BatchOutput(output) as full:
        full.resume(facts)
        full.append(result("a"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, limits[1]))
        try:
            with pytest.raises(Failure, match=r"cannot write .*out.jsonl"):
                full.append(result("b"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert output.stat().st_size == size
        full.append(result("b"))
    assert [each["custom_id"] for each in results_in(output)] == ["a", "b"]


def test_an_output_that_is_no_file_is_refused() -> None:
    with pytest.raises(Failure, match="not a regular file"):
        BatchOutput(Path("/dev/null"))


# ---- retries


REFUSED = LineOutcome(response(429), retry_after_s=3.0)
ENGINE_LOST = LineOutcome(response(503, {"error": {"code": "engine_lost"}}), retry_after_s=1.0)
LOST = LineOutcome(message="reset")
UNREACHABLE = LineOutcome(was_sent=False)


def pause_after(policy: RetryPolicy, outcome: LineOutcome) -> float:
    pause_s = policy.pause_after(outcome)
    assert pause_s is not None
    return pause_s


@pytest.mark.parametrize("status", [200, 400, 404, 413, 500, 504])
def test_other_answers_are_results_at_once(status: int) -> None:
    assert RetryPolicy(Random(1)).pause_after(LineOutcome(response(status))) is None


@pytest.mark.parametrize("outcome", [REFUSED, UNREACHABLE, LineOutcome(response(503))])
def test_a_refusal_is_never_a_result(outcome: LineOutcome) -> None:
    policy = RetryPolicy(Random(1))
    pauses = [pause_after(policy, outcome) for _ in range(100)]
    assert max(pauses) < 20


@pytest.mark.parametrize("outcome", [LOST, ENGINE_LOST, LineOutcome(response(502))])
def test_a_line_that_is_lost_each_time_fails_in_the_end(outcome: LineOutcome) -> None:
    policy = RetryPolicy(Random(1))
    pauses = [policy.pause_after(outcome) for _ in range(MAX_TRIES)]
    is_counted = outcome.trouble == "lost"
    assert [pause is None for pause in pauses] == [False] * (MAX_TRIES - 1) + [is_counted]


def test_pauses_grow_and_obey_the_server() -> None:
    policy = RetryPolicy(Random(1))
    own = [pause_after(policy, UNREACHABLE) for _ in range(8)]
    assert own == sorted(own)
    assert 0.25 <= own[0] < 0.4
    assert pause_after(RetryPolicy(Random(1)), REFUSED) >= 3
    endless = LineOutcome(response(429), retry_after_s=1e9)
    assert pause_after(RetryPolicy(Random(1)), endless) <= 75


def test_the_failure_of_a_line_names_the_last_trouble() -> None:
    assert "reset" in failure_of(LOST).message


# ---- progress


def test_the_progress_line_has_rates_and_the_time_left() -> None:
    with RunProgress(total=100, num_done=10, num_failed=1, now=50.0) as progress:
        usage = {"usage": {"prompt_tokens": 1, "completion_tokens": 30, "total_tokens": 31}}
        for number in range(10):
            progress.on_result(BatchResult("i", str(number), response=response(200, usage)))
        line = progress.line(now=60.0)
    assert line == "20 of 100 lines, 1.0 lines/s, 30 tokens/s, 1 failed, 0:01:20 left"


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"completion_tokens": 5, "total_tokens": 9}, 5),
        ({"output_tokens": 6, "total_tokens": 9}, 6),
        ({"prompt_tokens": 9, "total_tokens": 9}, 9),
        ({}, 0),
        (None, 0),
        ("odd", 0),
    ],
)
def test_tokens_are_counted_in_the_answers_of_each_api(usage: Any, tokens: int) -> None:
    assert tokens_of(BatchResult("i", "a", response=response(200, {"usage": usage}))) == tokens


def test_a_failed_line_has_no_tokens() -> None:
    failed = response(400, {"usage": {"total_tokens": 9}})
    assert tokens_of(BatchResult("i", "a", response=failed)) == 0
    assert duration(3723.4) == "1:02:03"
