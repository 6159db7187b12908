"""Balancing policies of the user's own: made with the config and the work, and their answers checked."""

import re
from pathlib import Path

import pytest

from twinbed.conf.schema import BalanceConf
from twinbed.policies.balance import Assignment, Half, Migrate, Prune
from twinbed.policies.balance.build import build_balance

from .balance_group import Group, work_of

ROOT = Path(__file__).resolve().parents[2]


def own_policy(tmp_path: Path, answer: str, *, name: str = "name = 'mine'") -> str:
    file = tmp_path / "own.py"
    file.write_text(
        "from twinbed.policies.balance import Half, Migrate, Prune\n"
        f"class Own:\n    {name}\n"
        "    def __init__(self, conf, work): self.work = work\n"
        f"    def decide(self, event): return {answer}\n"
    )
    return f"{file}:Own"


def measured_once(policy: str, balance: str = "semi") -> Group:
    group = Group(work_of(4), BalanceConf(name=balance, policy=policy))
    group.period((1.0,) * 4)
    return group


def test_the_documented_policy_works(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "adding-a-policy.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# lend_half.py\n.*?)```", text, re.S)
    (tmp_path / "lend_half.py").write_text(code)
    conf = BalanceConf(name="migrate", policy=f"{tmp_path / 'lend_half.py'}:LendHalf")
    group = Group(work_of(4), conf)
    now = (1.0, 1.0, 4.0, 1.0)
    assert not group.period((1.0,) * 4)
    assert list(group.periods([now] * 3)) == [True, False, False]
    assert group.policy.name == "lend_half"
    assert group.policy.predicted_speedup is None
    assert group.assignment.actions == (Migrate(2, 0, Half.ffn, group.work.units[Half.ffn] // 2),)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("(Prune(9, 0.5),)", r"balance.policy='.*own.py:Own': .*rank 9 must be in \[0, 4\)"),
        ("(Prune(0, 1.5),)", r"balance.policy=.*ratio=1.5 must be in \[0, 1\)"),
        ("(Migrate(0, 1, Half.ffn, 10**9),)", r"balance.policy=.*is to lend 1000000000 units of ffn"),
        ("[Prune(0, 0.5)]", r"balance.policy=.*answers \[Prune.*must be None, or a tuple"),
        ("('prune',)", r"balance.policy=.*must be None, or a tuple of Prune and Migrate"),
        ("(Prune(0, 0.5, 'fc1'),)", r"balance.policy=.*product='fc1'.*must be '' \(all\), or block.N.P"),
        (
            "(Prune(0, 0.5, 'block.99.fc1'),)",
            r"with N in \[0, 2\) and P one of \['qkv', 'out', 'fc1', 'fc2'\]",
        ),
        ("(Migrate(0, 1, 'ffn', 1),)", r"half must be Half.attention or Half.ffn"),
        ("(Migrate(0, 1, Half.ffn, 10.5),)", r"src, dst and units must be whole numbers"),
    ],
)
def test_an_answer_that_nobody_can_carry_out(tmp_path: Path, answer: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        measured_once(own_policy(tmp_path, answer))


@pytest.mark.parametrize(
    ("balance", "answer", "error"),
    [
        (
            "resize",
            "(Migrate(0, 1, Half.ffn, 1),)",
            "with balance=resize, which moves nothing: use balance=migrate",
        ),
        (
            "migrate",
            "(Prune(0, 0.5),)",
            "with balance=migrate, which prunes nothing: use balance=resize or semi",
        ),
    ],
)
def test_an_answer_that_the_settings_leave_no_room_for(
    tmp_path: Path, balance: str, answer: str, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        measured_once(own_policy(tmp_path, answer), balance)


def test_a_prediction_is_a_number(tmp_path: Path) -> None:
    group = measured_once(own_policy(tmp_path, "None", name="name = 'mine'; predicted_speedup = 'fast'"))
    with pytest.raises(ValueError, match=r"balance.policy=.*predicted_speedup='fast': must be a number"):
        _ = group.policy.predicted_speedup


def test_own_policies_are_made_with_the_config_and_the_work(tmp_path: Path) -> None:
    own = own_policy(tmp_path, "(Prune(3, 0.5),)", name="name = 'mine'; predicted_speedup = 1.5")
    group = measured_once(own)
    assert group.assignment == Assignment(group.work, (Prune(3, 0.5),))
    assert group.policy.predicted_speedup == 1.5


@pytest.mark.parametrize(
    ("given_name", "error"),
    [
        ("nowhere", "must be 'package.module:Class' or 'file.py:Class'"),
        ("no.such.module:Own", r"balance.policy='no.such.module:Own' cannot be loaded"),
        ("collections:OrderedDict", r"balance.policy='collections:OrderedDict' cannot be made"),
    ],
)
def test_own_policies_that_cannot_be_made(given_name: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        build_balance(BalanceConf(name="migrate", policy=given_name), work_of(4))


def test_own_policies_that_lack_something(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"makes a Own, which is no policy: it lacks \['name'\]"):
        measured_once(own_policy(tmp_path, "None", name="other = 1"))
