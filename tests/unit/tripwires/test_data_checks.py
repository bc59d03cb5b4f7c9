from __future__ import annotations

from nemo_like.tripwires.alarm import Alarm, alarm_message
from nemo_like.tripwires.data_checks import prompt_alarms, resume_alarms, reward_alarms


def test_the_same_prompts_again_are_warned_of() -> None:
    assert list(prompt_alarms((1, 2), None, 10)) == []
    assert list(prompt_alarms((1, 2), (2, 1), 10)) == []
    (alarm,) = prompt_alarms((1, 2), (1, 2), 10)
    assert not alarm.ends_run


def test_data_for_one_step_must_repeat() -> None:
    assert list(prompt_alarms((0, 1), (0, 1), 2)) == []


def test_the_third_step_without_a_varying_reward_is_warned_of_and_no_other() -> None:
    found = [len(list(reward_alarms(count, 0.0))) for count in range(6)]
    assert found == [0, 0, 0, 1, 0, 0]


def test_prompts_continue_where_the_checkpoint_has_them() -> None:
    assert list(resume_alarms({"offset": 8}, {"offset": 8})) == []
    (alarm,) = resume_alarms({"offset": 0}, {"offset": 8})
    assert alarm.wrong == "the prompts continue at {'offset': 0}, and the checkpoint has {'offset': 8}"


def test_a_message_has_every_alarm_of_a_step() -> None:
    alarms = [Alarm(tripwire=name, wrong=f"{name} is wrong", look_at="there") for name in ("a", "b")]
    assert alarm_message(alarms, 3) == (
        "at step 3, tripwire 'a': a is wrong; look at there\ntripwire 'b': b is wrong; look at there"
    )
