"""This file has the fixtures of all tests. What a test imports is in families.py (tiny random
models), fake_models.py (scripted ones), laws.py (distributions) and helpers.py."""
import gc
import os
import sys
from hashlib import sha1
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "models"), str(ROOT / "results")]
os.environ["HF_HUB_OFFLINE"] = "1"  # no test waits for the network
torch.set_num_threads(1)  # tiny models gain nothing from more
torch.backends.cuda.matmul.allow_tf32 = False

import families  # noqa: E402  (the path is set above)
from families import near, tiny  # noqa: E402
from support.loading import load  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where test_lossless.py runs its models")
    parser.addoption("--share", metavar="FOLDER",
                     help="run the tests that no other process with this folder has begun")
    parser.addoption("--backwards", action="store_true", help="begin with the last test")


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")
    families.DEVICE = config.getoption("--device")


def pytest_collection_modifyitems(config, items):
    """Leave out what needs a GPU where there is none, and put the tests into their order."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))
    if config.getoption("--backwards"):
        items.reverse()


def pytest_collection_finish():
    gc.freeze()  # what was imported is never searched for garbage, which takes time
    gc.set_threshold(100_000)  # and the rest of it seldom


def pytest_runtest_protocol(item):
    """Pass over a test that another process has begun. Each that begins leaves an empty file."""
    if folder := item.config.getoption("--share"):
        try:
            Path(folder, sha1(item.nodeid.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return True
    return None


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """Let Python's clock stand still but where a test moves it: now[0] is its time."""
    time = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: time[0])
    return time


@pytest.fixture(scope="session")
def embedded():
    """Load (target, draft, tokenizer) of models/, in float32 on the CPU."""
    target, tokenizer = load(ROOT / "models/target", "cpu", "float32")
    return target, load(ROOT / "models/draft", "cpu", "float32")[0], tokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory, embedded) -> list[str]:
    """Make random models with the embedded tokenizer, and return the bench's arguments for them."""
    *_, tokenizer = embedded
    path = tmp_path_factory.mktemp("models")
    target = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=400)
    for name, model in ("target", target), ("draft", near(target, 0.01)):
        model.save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    return ["--target", str(path / "target"), "--draft", str(path / "draft"), "--adapters",
            str(path), "--device", "cpu", "-n", "1", "--rounds", "1"]
