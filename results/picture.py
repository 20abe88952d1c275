"""Draw an animated SVG of one real run beside token by token: `make picture`.

The data are those of --trace. The picture needs no script, since CSS alone moves it. Its first
frame says the same, all text in grey above the calls' real times. A token gets its colour when its
call is over, 30 times slower than it was.
"""
import sys
from html import escape

from bench import AR, ROOT, Bench, parser_of, run_script  # it sets the path for what follows
from cli.text import split_text
from cli.trace import watch
from support.files import write_text

SLOWER = 30
STYLE = """
svg { background: #ffffff; font: 13px ui-monospace, Menlo, Consolas, monospace; }
text { fill: #59636e; white-space: pre; }
.head { font: 600 14px system-ui, sans-serif; fill: #1f2328; }
.guess, .own { animation: show .05s both; fill: #1a7f37; }
.own { fill: #0969da; }
.target { fill: #0969da; } .draft { fill: #d9822b; }
.now { stroke: #1f2328; animation: move linear both; }
@keyframes show { from { fill: #d1d9e0; } }
@keyframes move { from { transform: translateX(0); } to { transform: translateX(var(--way)); } }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117; } text { fill: #9198a1; } .head { fill: #f0f6fc; }
  .guess { fill: #3fb950; } .own { fill: #4493f8; } .target { fill: #4493f8; }
  .now { stroke: #f0f6fc; }
  @keyframes show { from { fill: #3d444d; } }
}
@media (prefers-reduced-motion: reduce) { * { animation: none !important; } }
"""


def write_svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """Write a picture as SVG: its size, what a screen reader says of it, and its parts."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">\n<title>{title}</title>\n'
            f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n")


def list_calls(run: dict) -> list[dict]:
    """List the calls of all rounds of a run."""
    return [call for step in run["rounds"] for call in step["calls"]]


def write_run(run: dict, tokenizer, x: int, y: int) -> list[str]:
    """Write a run's text as lines of SVG, each token coloured when its round ends.

    x, y     where it begins
    """
    answer = [token for step in run["rounds"] for token in step["chunk"]]
    texts, body = iter(split_text(tokenizer, answer)), ""
    for step in run["rounds"]:
        after = SLOWER * step["calls"][-1]["time"][1] / 1000
        for i, text in zip(range(len(step["chunk"])), texts):
            kind = "own" if i == len(step["chunk"]) - 1 else "guess"
            begin = f'<tspan class="{kind}" style="animation-delay:{after:.2f}s">'
            body += begin + escape(text).replace("\n", f"</tspan>\n{begin}") + "</tspan>"
    return [f'<text x="{x}" y="{y + 19 * i}">{line}</text>'
            for i, line in enumerate(body.split("\n"))]


def draw_lane(run: dict, scale: float, x: int, y: int) -> str:
    """Draw a run's calls over real time, and a line that passes over them."""
    end = list_calls(run)[-1]["time"][1]
    bars = [f'<rect class="{"target" if call["lm"] == run["target"] else "draft"}" '
            f'x="{x + scale * call["time"][0]:.1f}" y="{y}" height="14" '
            f'width="{max(0.5, scale * (call["time"][1] - call["time"][0]) - 0.5):.1f}"/>'
            for call in list_calls(run)]
    now = (f'<line class="now" x1="{x}" x2="{x}" y1="{y - 3}" y2="{y + 17}" '
           f'style="--way:{scale * end:.1f}px;animation-duration:{SLOWER * end / 1000:.2f}s"/>')
    return "\n".join([*bars, now])


def draw_picture(runs: list[dict], tokenizer, width: int = 860) -> str:
    """Draw two runs of one prompt side by side."""
    ends = [list_calls(run)[-1]["time"][1] for run in runs]
    half, parts, most = width // 2, [], 0
    for i, (run, end) in enumerate(zip(runs, ends)):
        x = 16 + i * half
        n = sum(len(step["chunk"]) for step in run["rounds"])
        text = write_run(run, tokenizer, x, 62)
        most = max(most, len(text))
        calls = sum(call["lm"] == run["target"] for call in list_calls(run))
        name = "token by token" if run["method"] == "autoregressive" else run["method"]
        parts += [f'<text class="head" x="{x}" y="24">{name}</text>',
                  f'<text x="{x}" y="42">{n} tokens, {calls} target calls, {end:.0f} ms</text>',
                  *text]
    top = 62 + 19 * most
    parts += [draw_lane(run, (half - 40) / max(ends), 16 + i * half, top)
              for i, run in enumerate(runs)]
    height = top + 52
    parts.append(f'<text x="16" y="{height - 12}"><tspan class="guess">guesses that were kept'
                 "</tspan>, <tspan class='own'>the target's own choice</tspan>; bars: calls of "
                 "target and draft, in real proportion</text>")
    title = f"{runs[0]['method']} beside token by token: {ends[1] / ends[0]:.1f} times as fast"
    return write_svg(width, height, title, parts)


def record(bench: Bench, line: str, prompt: list[int]) -> dict:
    """Record the run of a row of the bench on a prompt, after a first run that warms up."""
    ours = bench.row(line)
    ours(prompt)
    ours.new_round()
    records, run = [], ours.start_run()
    list(watch(records, run, prompt, run.decode(prompt, ours.limit, ours.sample)))
    return records[0]


def main() -> None:
    """Trace Ouroboros and token by token on the last example, after a run of each."""
    parser = parser_of(__doc__)
    parser.set_defaults(prompts=str(ROOT / "models/examples.jsonl"), max_new_tokens=120,
                        device="cpu")
    bench = Bench(parser.parse_args())
    _, prompt = bench.pairs[-1]
    runs = [record(bench, line, prompt) for line in ("ouroboros", AR)]
    out = ROOT / ".github/decode.svg"
    write_text(out, draw_picture(runs, bench.tokenizer))
    print(f"{out}: {out.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_script(main))
