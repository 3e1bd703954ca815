"""The reader and runner of documentation blocks notice what they are there to notice."""

import pytest
from tests.docs.blocks import DocumentationError, check_block, read_blocks, run_block

DOCUMENT = """
text
```console
$ echo one 1.25
one 1.25
$ echo two \\
> three
two three
```
<!-- docs: slow, exit=3 -->
```bash
# a comment
echo first
exit 3
```
```python
echo not a command
```
"""


def test_blocks_are_read_with_their_commands_and_options():
    console, bash = read_blocks(DOCUMENT)
    assert console.commands == ["echo one 1.25", "echo two \\\nthree"]
    assert console.line == 4
    assert bash.commands == ["echo first", "exit 3"]
    assert bash.options == {"slow": "", "exit": "3"}


def test_output_that_is_as_shown_passes(tmp_path):
    block = read_blocks(DOCUMENT)[0]
    made = run_block(block, tmp_path)
    assert made == block.body
    check_block(block, made)


@pytest.mark.parametrize(
    ("options", "shown", "passes"),
    [
        ("", "one 9.75", True),
        ("", "one 1,234e-5", True),
        ("", "ones 1.25", False),
        ("", "one 1.25\nmore", False),
        ("<!-- docs: exact -->\n", "one 9.75", False),
    ],
)
def test_text_that_drifted_is_noticed_and_numbers_where_the_block_is_exact(tmp_path, options, shown, passes):
    block = read_blocks(f"{options}```console\n$ echo one 1.25\n{shown}\n```\n")[0]
    made = run_block(block, tmp_path)
    if passes:
        check_block(block, made)
    else:
        with pytest.raises(DocumentationError, match="make docs"):
            check_block(block, made)


@pytest.mark.parametrize(
    ("shown", "passes"),
    [
        ("yes  2.25  3/weight/output.weight    equal", True),
        ("NO   2.25  3/weight/output.weight    equal", False),
        ("yes  2.25  3/weight/output.weight    DIFFER", False),
    ],
)
def test_which_tensor_rounding_moves_most_may_differ_and_no_other_word_of_a_verdict(shown, passes):
    made = "yes  1.25  1/gradient/norm.weight  equal\n"
    (block,) = read_blocks(f"```console\n{shown}\n```\n")
    if passes:
        check_block(block, made)
    else:
        with pytest.raises(DocumentationError, match="make docs"):
            check_block(block, made)


@pytest.mark.parametrize(("command", "code"), [("exit 1", 0), ("true", 2), ("no-such-command", 0)])
def test_another_exit_code_than_the_block_says_is_noticed(tmp_path, command, code):
    block = read_blocks(f"<!-- docs: exit={code} -->\n```bash\n{command}\n```\n")[0]
    with pytest.raises(DocumentationError, match=f"not {code}"):
        run_block(block, tmp_path)


def test_an_unknown_option_is_refused():
    with pytest.raises(DocumentationError, match="fast"):
        read_blocks("<!-- docs: fast -->\n```bash\ntrue\n```\n")


def test_long_output_is_cut_in_its_middle(tmp_path):
    block = read_blocks("<!-- docs: lines=3 -->\n```console\n$ printf '%s\\n' 1 2 3 4 5 6\n```\n")[0]
    assert run_block(block, tmp_path).splitlines()[1:] == ["1", "2", "...", "6"]
