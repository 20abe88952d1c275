"""Draws a Jacobi trajectory in the terminal, as CLLM's Fig. 2: `python -m cli jacobi --show`."""
import sys


def show_trajectory(chunks, tokenizer, colour: bool, log: list) -> None:
    """Print each block's trajectory when the block is final, and the text at the end.

    chunks     the chunks of a Jacobi decoding that has begun already
    tokenizer  turns tokens into text
    colour     unused, since whether stdout is a terminal decides
    log        the log of the decoding, which has one record for each block
    """
    text = []
    for chunk in chunks:
        text += chunk
        block = log[-1]  # to which the chunk belongs
        final = block["final"][-1]
        whole = final >= len(block["states"][0])
        if whole:  # all of its tokens are final
            print_states(block["states"], tokenizer)
    if not whole:  # EOS or the limit cut the last block
        print_states([y[:final] for y in block["states"]], tokenizer)
    print(tokenizer.decode(text, skip_special_tokens=True), flush=True)


def print_states(states: list[list[int]], tokenizer) -> None:
    """Print the states of a block, a line for each state and a column for each token.

    Right tokens are green and wrong ones red. Where stdout is no terminal, wrong tokens stand in
    brackets instead.
    """
    terminal = sys.stdout.isatty()
    y_star = states[-1]

    def cell_of(token: int, right: int) -> str:
        word = repr(tokenizer.decode([token]))[1:-1]
        return word if terminal or token == right else f"[{word}]"
    rows = [[cell_of(token, right) for token, right in zip(y, y_star)] for y in states]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for number, (y, row) in enumerate(zip(states, rows)):
        cells = [word.ljust(width) for word, width in zip(row, widths)]
        if terminal:
            # The terminal's numbers of green and of red
            colours = [32 if token == right else 31 for token, right in zip(y, y_star)]
            cells = [f"\033[{colour}m{cell}\033[0m" for colour, cell in zip(colours, cells)]
        print(f"{number:3}: {' '.join(cells)}".rstrip())
    print(flush=True)
