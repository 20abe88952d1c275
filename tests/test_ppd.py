"""The table of Predictive Pipelined Decoding."""
from types import SimpleNamespace

import pytest

from common import CachedLM, autoregressive
from families import deep
from helpers import tokens_of
from results.ppd import ppd
from survey.layerskip import measure_exit

WORDLESS = SimpleNamespace(eos_token_id=None)


def test_ppd_table(capsys):
    model = deep("llama")
    ppd(model, WORDLESS, [[3, 4], [5, 6, 7]], max_new_tokens=12)
    rows = [row.split("|")[1:-1] for row in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["1 of 4"] * 3 + ["2 of 4"] * 3 + ["3 of 4"] * 3
    data = [(p, tokens_of(autoregressive(CachedLM(model), p), 12)) for p in ([3, 4], [5, 6, 7])]
    for d, k, right, latency in rows:
        expected = measure_exit(model, data, int(d.split()[0]), int(k))
        assert float(right) == pytest.approx(expected, abs=1e-3)
        assert float(latency) == pytest.approx(1 - expected * (4 - int(d.split()[0])) / 4, abs=1e-3)
