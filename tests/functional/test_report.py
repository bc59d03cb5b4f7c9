"""The report's page in a real browser, without a network: clicks, texts, and nothing on the console."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from scripts.report import main
from tests.functional.browser import LACKING, Browser, chromium
from tests.functional.report_runs import STRANGE, write_run

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("chromium") is None, reason=LACKING),
]
NOTHING = "\u2013"  # stands where there is no number
READY = "document.body && document.body.dataset.view"
NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 3, 8, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of 8 groups of 4, groups 3 and 7 of the broken environment, and two validations."""
    directory = write_run(
        tmp_path_factory.mktemp("runs") / "small",
        num_steps=NUM_STEPS, num_groups=NUM_GROUPS, group_size=GROUP_SIZE,
    )  # fmt: skip
    assert main([str(directory)]) == 0
    return directory


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as browser:
        yield browser


@pytest.fixture
def browser(started: Browser) -> Iterator[Browser]:
    """A browser that must not have complained after the test, nor asked for anything but the page."""
    started.resize(1280, 900)
    yield started
    assert started.complaints == []
    assert {address.split(":")[0] for address in started.addresses} <= {"file", "data", "about"}


@pytest.fixture
def page(browser: Browser, run: Path) -> Browser:
    browser.open(Path("/dev/null"), "document.body")
    browser.open(run / "report.html", READY)
    return browser


def go(page: Browser, view: str, selector: str, text: str = "") -> None:
    """Click on something that leads to a view."""
    page.click(selector, text)
    page.wait(f"document.body.dataset.view == '{view}'")


def rows(page: Browser, table: str) -> list[list[str]]:
    """The cells of a table's rows, as they are shown."""
    return [
        row.split("\n")
        for row in page.evaluate(
            f"[...document.querySelectorAll('#{table} .row')].map((row) => "
            "[...row.children].map((cell) => cell.textContent).join('\\n'))"
        )
    ]


def test_a_sample_is_reached_by_its_step_and_its_group(page: Browser) -> None:
    go(page, "steps", "#tab-steps")
    # 8 groups of 4. Two groups failed; five have solved 2 of 4, group 1 has solved 3: 13 of 24.
    assert rows(page, "steps")[0][:5] == ["1", "training", "8", "32", "0.5417"]
    assert rows(page, "steps")[3][:4] == ["0", "validation", "8", "8"]
    go(page, "step", "#steps .row")
    assert rows(page, "groups")[0][:3] == ["0", "0+1=", "4"]
    assert rows(page, "groups")[0][-2:] == ["sums", "pairs 0"]
    assert [row[6] for row in rows(page, "groups")] == ["0", "0", "0", "4", "0", "0", "0", "4"]
    go(page, "group", "#groups .row")
    # step, reward, prompt, response, components, outcome
    assert [row[:2] for row in rows(page, "samples")] == [["1", "1"], ["1", "1"], ["1", "0"], ["1", "0"]]
    shown = f"first try no, again {STRANGE}"
    assert rows(page, "samples")[0][2:6] == ["0+1=", shown, "exact 1 · brevity 0", "trained"]
    go(page, "sample", "#samples .row")
    assert page.text("#prompt") == "0+1="
    assert rows(page, "components") == [["exact", "1"], ["brevity", "0"]]
    assert "policy_version1" in page.evaluate("document.querySelector('.facts').textContent")


def test_the_tokens_of_all_turns_have_the_colours_for_which_there_are_numbers(page: Browser) -> None:
    go(page, "samples", "#tab-samples")
    go(page, "sample", "#samples .row")
    colours = ["plain text", "advantage", "engine - trainer", "entropy", "log-prob", "trainer's log-prob"]
    assert page.texts("#colour option") == [*colours, "version"]
    assert page.texts("#turns .role") == ["assistant", "environment", "assistant"]
    tokens = page.evaluate("[...document.querySelectorAll('#turns .token')].map((one) => one.textContent)")
    assert "".join(tokens) == "t0 t1 t2 t3 t0 t1 t2 t0 t1 t2 t3 "
    page.choose("#colour", "engine - trainer")
    # Engine -0.25, -0.5, -0.75, -1; trainer -0.75: 0.5, 0.25, 0, -0.25, and the observation has no colour.
    # The strongest is 0.75 opaque, half of it 0.375, which the browser rounds to a 255th.
    backgrounds = page.evaluate(
        "[...document.querySelectorAll('#turns .token')].map((one) => one.style.background)"
    )
    green, red = "rgba(46, 139, 87, {})", "rgba(209, 73, 91, {})"
    response = [green.format("0.75"), green.format("0.376"), green.format("0"), red.format("0.376")]
    assert backgrounds == [*response, "", "", "", *response]
    page.choose("#colour", "entropy")
    about = "of what could have been sampled here, by the trainer, nats"
    assert page.texts("#scale > span") == ["0", "", "1", about]
    lines = page.evaluate(
        "[...document.querySelectorAll('#turns .token')].map((one) => one.title.split('\\n')[2] ?? null)"
    )
    # Of the eleven tokens after the prompt 0, 0.1, ... 1; three are of the observation.
    response = ["entropy 0", "entropy 0.1", "entropy 0.2", "entropy 0.3"]
    assert lines == [*response, None, None, None, "entropy 0.7", "entropy 0.8", "entropy 0.9", "entropy 1"]
    assert page.evaluate("document.querySelector('#unscored')") is None
    page.choose("#colour", "plain text")
    assert page.texts("#turns pre") == ["first try", "no, again", STRANGE]


def test_the_page_says_that_nobody_scored_the_samples_of_a_validation(page: Browser) -> None:
    go(page, "samples", "#tab-samples")
    page.choose("#filter-mode", "validation")
    page.wait("location.hash.includes('mode=validation')")
    go(page, "sample", "#samples .row")
    assert page.texts("#colour option") == ["plain text", "advantage", "log-prob", "version"]
    assert page.text("#unscored").startswith("The trainer did not score this sample")


def test_a_click_counts_where_the_table_is_drawn_between_press_and_release(page: Browser) -> None:
    go(page, "samples", "#tab-samples")
    draw = "document.querySelector('#samples .body').dispatchEvent(new Event('scroll'))"
    page.click("#samples .row", "2+1=", meanwhile=draw)
    page.wait("document.body.dataset.view == 'sample'")
    assert page.text("#prompt") == "2+1="


def test_rows_that_stay_in_sight_keep_their_elements_and_all_are_in_order(page: Browser) -> None:
    go(page, "samples", "#tab-samples")
    page.evaluate(
        "const body = document.querySelector('#samples .body');"
        "const rowAt = (place) => [...body.querySelectorAll('.row')].find("
        "  (row) => row.style.top === `${26 * place}px`);"
        "const kept = rowAt(25)"
    )
    places = "[...body.querySelectorAll('.row')].map((row) => Number.parseInt(row.style.top) / 26)"
    assert page.evaluate(places) == list(range(30))
    # Five rows above what is in sight, 20 in sight, five below.
    for first in (10, 4):
        page.evaluate(f"body.scrollTop = 26 * {first + 5}")
        page.wait(f"rowAt({first}) && !rowAt({first - 1})")
        assert page.evaluate(places) == list(range(first, first + 30))
        assert page.evaluate("rowAt(25) === kept")
    page.click("#samples .head span", "length")
    page.click("#samples .head span", "reward")
    assert page.evaluate(places) == list(range(4, 34))
    assert not page.evaluate("kept.isConnected")


def test_the_failures_of_a_broken_environment_are_three_clicks_away(page: Browser) -> None:
    failures = rows(page, "failures")
    assert failures == [
        ["broken", "raised", "training", "24", "3", "KeyError: 'answer' of problem 3"],
        ["broken", "raised", "validation", "4", "3", "KeyError: 'answer' of problem 3"],
    ]
    go(page, "samples", "#failures .row", "training")
    assert page.text("#count") == "24 of 112 samples"
    go(page, "sample", "#samples .row", "pairs 7")
    assert page.text("#failure").startswith("The reward failed: raised")
    assert "KeyError: 'answer' of problem 7" in page.text("#failure")


@pytest.mark.parametrize(
    ("field", "value", "count"),
    [
        ("env", "broken", 28),  # 2 of 8 groups
        ("mode", "validation", 16),
        ("outcome", "reward_failed", 24),
        ("index", "2", 14),  # 3 x 4, and two in validations
        # In training 2, 3 and 4 solved in five groups, 3, 2 and 0 in group 1; in validations 1 and 5.
        ("min_reward", "0.5", 56),
        ("max_length", "7", 48),  # half of the samples in training
        ("prompt", "7+", 14),
        ("response", "FIRST TRY", 112),  # of the first turn, which a table's row may not have
        ("response", "no such words", 0),
    ],
)
def test_a_filter_leaves_what_it_says(page: Browser, field: str, value: str, count: int) -> None:
    go(page, "samples", "#tab-samples")
    page.choose(f"#filter-{field}", value)
    page.wait(f"document.querySelector('#count').innerText.startsWith('{count} of 112')")


def test_a_search_unpacks_the_steps_that_the_other_filters_leave_and_nothing_before(page: Browser) -> None:
    page.evaluate("responseCache.clear()")
    go(page, "samples", "#tab-samples")
    assert page.evaluate("responseCache.size") == 0
    page.choose("#filter-mode", "validation")
    page.wait("location.hash.includes('mode=validation')")
    page.choose("#filter-response", "No, Again")
    page.wait("document.querySelector('#count').innerText.startsWith('16 of 112')")
    page.wait("location.hash.includes('response=')")
    page.wait("responseCache.size > 1")
    assert page.evaluate("[...responseCache.keys()]") == ["shard-0-3", "shard-0-4"]  # of two validations
    assert page.text("#progress") == ""


def test_problems_show_what_fails_and_what_got_worse(page: Browser) -> None:
    go(page, "problems", "#tab-problems")
    page.choose("#filter-mode", "training")
    page.wait("location.hash.includes('mode=training')")
    page.wait("document.querySelectorAll('#problems .row').length == 8")
    first = rows(page, "problems")[0]
    # Group 1: 3 of 4 solved at first, 0 at the latest step.
    assert (first[0], first[1:4]) == ("1+1=", ["0.75", "0", "-0.75"])
    page.click("#problems .head span", "change")
    assert rows(page, "problems")[0][0] == "1+1="
    assert [row[3] for row in rows(page, "problems")[-2:]] == [NOTHING, NOTHING]  # those that failed
    go(page, "samples", "#problems .row")
    assert page.text("#count") == "12 of 112 samples"


def test_times_have_the_stages_of_each_step_and_what_was_idle(page: Browser) -> None:
    go(page, "times", "#tab-times")
    assert rows(page, "times")[0] == ["1", "4", "2", "1", "1", "75.0 %", "87.5 %", "62.5 %"]
    assert page.evaluate("document.querySelectorAll('#stages rect').length") == 3 * 3


def test_each_curve_says_what_it_is_and_a_metric_leads_to_its_curve(page: Browser) -> None:
    title = page.evaluate("document.querySelector('.chart h3').title")
    assert page.text(".chart h3") == "train/reward"
    assert title.startswith("mean raw reward of all samples of the step that their environments could judge")
    go(page, "metrics", "#tab-metrics")
    metrics = {row[0]: row[1:] for row in rows(page, "metrics")}
    assert metrics["train/reward"] == ["1", title]
    assert metrics["performance/overhead_share"][0] == "0.625"
    assert all(meaning != NOTHING for _, meaning in metrics.values())
    target = page.evaluate("document.querySelector('#main a').href")
    assert target.startswith("file:///") and target.endswith("/docs/reference/metrics.md")
    assert Path(unquote(target.removeprefix("file://"))).read_text().startswith("# Metrics")
    assert "no part of this page" in page.text("#main .note")
    go(page, "overview", "#metrics .row", "timing/train/generation")
    assert page.text(".chart h3") == "timing/train/generation"


def drawn(page: Browser, place: int = 0) -> list[dict[str, Any]]:
    """The lines of a picture as Bokeh has them: name, [steps, values], [steps, averages]."""
    page.wait(f"document.querySelectorAll('.plot')[{place}]?.view")
    data = "{{x: [...{0}.data.x], y: [...{0}.data.y]}}"
    return page.evaluate(
        f"document.querySelectorAll('.plot')[{place}].drawn.map((line) => ({{ name: line.name, "
        f"raw: {data.format('line.raw')}, average: {data.format('line.average')} }}))"
    )


def set_smoothing(page: Browser, weight: float) -> None:
    page.evaluate(
        f"(() => {{ const slider = document.querySelector('#smooth'); slider.value = {weight};"
        " slider.dispatchEvent(new Event('input')); })()"
    )


TWELVE = "[1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0].map((third, index) => [index + 1, third / 3])"


def test_a_slider_smooths_curves_of_more_than_a_few_points_and_the_address_keeps_it(page: Browser) -> None:
    (line,) = drawn(page)
    # A reward of a third, two thirds, one.
    assert line["raw"]["x"] == [1, 2, 3]
    assert line["raw"]["y"] == line["average"]["y"] == [0.333333, 0.666667, 1]
    longer = f"{{ name: 'a', colour: '#000000', run: 0, points: {TWELVE} }}"
    page.evaluate(f"document.querySelector('.chart').before(chart('longer', '', [{longer}]))")
    drawn(page)
    set_smoothing(page, 0.5)
    page.wait("document.querySelector('.plot').drawn[0].average.data.y[2] < 1")
    # 1/3; (1/2 x 2/3 + 1/4 x 1/3) / (3/4) = 5/9; (1/2 + 1/4 x 2/3 + 1/8 x 1/3) / (7/8) = 17/21
    (line,) = drawn(page)
    assert line["average"]["y"][:3] == pytest.approx([1 / 3, 5 / 9, 17 / 21], abs=1e-5)
    assert line["raw"]["y"][:3] == pytest.approx([1 / 3, 2 / 3, 1])
    (few,) = drawn(page, 1)
    assert few["average"]["y"] == [0.333333, 0.666667, 1]
    assert "smooth=0.5" in page.evaluate("location.hash")
    go(page, "steps", "#tab-steps")
    go(page, "overview", "#tab-overview")
    assert page.evaluate("document.querySelector('#smooth').value") == "0.5"


def test_the_mouse_shows_step_and_value(page: Browser) -> None:
    drawn(page)
    page.evaluate(
        "(() => { const plot = document.querySelector('.plot'), box = plot.getBoundingClientRect();"
        " const at = box.left + plot.view.frame.x_scale.compute(2.1);"
        " plot.dispatchEvent(new PointerEvent('pointermove', { clientX: at, clientY: box.top + 9 })); })()"
    )
    assert page.text(".tip").split() == ["step", "2", "0.6667"]
    assert page.evaluate("document.querySelectorAll('.crosshair').length") == 1
    page.evaluate("document.querySelector('.plot').dispatchEvent(new PointerEvent('pointerleave'))")
    assert page.evaluate("document.querySelector('.tip')") is None


@pytest.fixture(scope="module")
def both(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs; the second has two steps, of which one reward is 0."""
    other = write_run(tmp_path_factory.mktemp("runs") / "other", num_steps=2, num_groups=4, group_size=2)
    (other / "metrics.jsonl").write_text(
        '{"step": 1, "train/reward": 0.0}\n{"step": 2, "train/reward": 0.5}\n'
    )
    (run / "config.yaml").write_text("grpo: {seed: 1, steps: 3}\npolicy: {lr: 0.001}\n")
    (other / "config.yaml").write_text("grpo: {seed: 2, steps: 3}\npolicy: {warmup: 5}\n")
    page = other.parent / "both.html"
    assert main([str(run), str(other), "--output", str(page)]) == 0
    return page


def test_runs_are_compared_in_one_picture(browser: Browser, both: Path) -> None:
    browser.open(both, READY)
    assert [row.split("\t")[0] for row in browser.texts("#runs tr")] == ["run", "small", "other"]
    assert [line["name"] for line in drawn(browser)] == ["small", "other"]
    assert browser.texts("#legend label") == ["small", "other"]
    browser.evaluate("document.querySelector('#legend input').click()")
    browser.wait("document.querySelector('.plot').drawn.length == 1")
    assert [line["name"] for line in drawn(browser)] == ["other"]
    assert "hide=0" in browser.evaluate("location.hash")
    go(browser, "samples", "#tab-samples")
    browser.choose("#filter-run", "1")
    browser.wait("document.querySelector('#count').innerText == '24 of 136 samples'")
    assert rows(browser, "samples")[0][0] == "other"


def test_a_log_axis_leaves_out_what_it_cannot_have_and_says_so(browser: Browser, both: Path) -> None:
    browser.open(Path("/dev/null"), "document.body")
    browser.open(f"{both.as_uri()}#log=1", READY)
    assert [line["raw"]["x"] for line in drawn(browser)] == [[1, 2, 3], [2]]
    assert browser.text(".reading") == "1 values of 0 or less, which a log axis cannot have, are left out"


def test_configurations_show_how_runs_differ(browser: Browser, both: Path) -> None:
    browser.open(Path("/dev/null"), "document.body")
    browser.open(both, READY)
    go(browser, "configuration", "#tab-configuration")
    lines = [row.split("\t") for row in browser.texts("#configuration tr")]
    assert lines == [
        ["key", "small", "other"],
        ["grpo.seed", "1", "2"],
        ["policy.lr", "0.001", NOTHING],
        ["policy.warmup", NOTHING, "5"],
    ]
    assert browser.text("#count") == "3 of 4 keys differ; 3 are shown"
    browser.evaluate("document.querySelector('#all-keys').click()")
    browser.wait("location.hash.includes('all=1')")
    browser.wait("document.querySelectorAll('#configuration tr').length == 5")


def test_the_button_gives_the_address_of_the_view(page: Browser) -> None:
    go(page, "samples", "#tab-samples")
    page.choose("#filter-env", "broken")
    page.wait("location.hash.includes('env=broken')")
    page.click("#samples .head span", "length")
    page.click("#copy")
    fragment = page.evaluate("document.querySelector('#link').value")
    assert fragment == page.evaluate("location.hash")
    assert "env=broken" in fragment and "sort=samples.1.length" in fragment


@pytest.mark.parametrize(
    ("fragment", "told"),
    [
        ("view=sample&run=0&mode=training&step=9&group=0&generation=0",
         "This page has no sample 0 of group 0 of training step 9. It has training steps 1, 2, 3 and "
         "validations 0, 3 of that run."),
        ("view=step&run=7&mode=training&step=1",
         "This page has no samples of training step 1. It has 1 runs."),
        ("view=nothing", "This page has no view nothing. This is its overview."),
        ("metric=train/nothing", "This page has no curve of train/nothing."),
    ],
)  # fmt: skip
def test_an_address_of_what_is_not_there_says_so(
    browser: Browser, run: Path, fragment: str, told: str
) -> None:
    browser.open(Path("/dev/null"), "document.body")
    browser.open(f"{(run / 'report.html').as_uri()}#{fragment}", READY)
    assert browser.text(".absent") == told


def test_the_head_says_how_the_run_went_and_with_what(browser: Browser, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "ended", num_steps=1, num_groups=1, group_size=1)
    began = {"began": "2026-03-01T10:00:00+00:00", "ended": "2026-03-01T12:05:00+00:00"}
    (directory / "starts").mkdir()
    (directory / "starts" / "1.json").write_text(json.dumps({
        "host": "node-7", "boot_id": "b", "pid_namespace": None, "pid": 17, "process_began": 5,
        "slurm_job": None, "slurm_restarts": 0, **began,
    }))  # fmt: skip
    ended = {"time": began["ended"], "kind": "ended", "text": "failed: no GPU", "step": None, "exit_code": 1}
    (directory / "events.jsonl").write_text(json.dumps(ended) + "\n")
    packages = {"numpy": "2.3.5", "torch": "2.13.0"}
    software = {"commit": "0123456789abcdef", "has_changes": True, "python": "3.11.7", "packages": packages}
    (directory / "software.json").write_text(json.dumps(software))
    assert main([str(directory)]) == 0
    browser.open(directory / "report.html", READY)
    assert browser.text("header .status") == "failed"
    cards = dict(card.split("\n") for card in browser.texts(".card"))
    assert (cards["duration"], cards["host"], cards["Python"]) == ("2 h 5 min", "node-7", "3.11.7")
    assert (cards["commit"], cards["packages"]) == ("0123456789, with changes", "torch 2.13.0")
    assert browser.text("main .bad") == "The run failed: no GPU."
    # One step has numbers, and no curves.
    assert browser.evaluate("document.querySelectorAll('.plot').length") == 0
    assert ["train/reward", "1"] in [row[:2] for row in rows(browser, "numbers")]


def test_an_evaluation_has_a_table_of_its_numbers(browser: Browser, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "evaluated", num_steps=1, num_groups=2, group_size=1)
    (directory / "metrics.jsonl").write_text('{"step": 80, "validation/accuracy": 0.5}\n')
    number = {"value": 0.5, "standard_error": 0.1, "interval": [0.25, 0.75]}
    group = {"by": "all", "name": "all", "num_problems": 4, "num_answers": 8, "num_failed_rewards": 1,
             "metrics": {"accuracy": number}}  # fmt: skip
    (directory / "evaluation.json").write_text(json.dumps({"groups": [group]}))
    assert main([str(directory)]) == 0
    browser.open(directory / "report.html", READY)
    assert [row.split("\t") for row in browser.texts("#evaluation tr")] == [
        ["", "all problems"],
        ["accuracy", "0.5 [0.25, 0.75]"],
        ["problems", "4"],
        ["answers", "8"],
        ["not judged", "1"],
    ]
    assert browser.evaluate("document.querySelectorAll('.plot').length") == 0


@pytest.mark.parametrize("width", [390, 800, 1400])
@pytest.mark.parametrize("view", ["overview", "samples", "sample", "problems", "times", "configuration"])
def test_no_view_is_wider_than_the_window(browser: Browser, both: Path, width: int, view: str) -> None:
    browser.resize(width, 800)
    browser.open(Path("/dev/null"), "document.body")
    sample = "&run=0&mode=training&step=1&group=0&generation=0" if view == "sample" else ""
    browser.open(f"{both.as_uri()}#view={view}{sample}", READY)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if view == "overview":
        drawn(browser)
        assert browser.evaluate(
            "[...document.querySelectorAll('.plot')].every((one) => "
            "!one.place || one.place.getBoundingClientRect().right <= innerWidth)"
        )


@pytest.mark.slow
def test_ten_thousand_samples_open_and_scroll(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "large", num_steps=20, num_groups=50, group_size=10)
    assert main([str(run)]) == 0
    browser.open(run / "report.html", READY)
    size = (run / "report.html").stat().st_size
    print(f"{size:,} bytes, open after {browser.evaluate('performance.now()'):.0f} ms")
    go(browser, "samples", "#tab-samples")
    assert browser.text("#count") == "10,100 of 10,100 samples"
    assert 20 < browser.evaluate("document.querySelectorAll('#samples .row').length") < 60
    browser.evaluate("document.querySelector('#samples .body').scrollTop = 26 * 9999")
    browser.wait("[...document.querySelectorAll('#samples .row')].some((row) => row.style.top == '259974px')")
    assert "49+1=" in [row[2] for row in rows(browser, "samples")]
    go(browser, "sample", "#samples .row", "49+1=")
    assert browser.text("#prompt") == "49+1="
