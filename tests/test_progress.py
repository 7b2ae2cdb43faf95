"""Progress: a line that fits, in place on a terminal, now and then in a log, not at all when quiet."""

import io

from ftrain import recipe
from ftrain.data import open_data
from ftrain.progress import Progress, duration, progress_line, quantity, size, tokenising_line
from ftrain.trainer import train, validate

RECORD = {
    "step": 120,
    "loss": 2.3456,
    "lr": 3e-4,
    "grad_norm": 123.456,
    "tokens_per_second": 123456.0,
    "mfu": 0.416,
    "memory_bytes": 130 * 2**30,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Watch:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self):
        return self.now


def reading(progress, watch, seconds, total=100_000_000, parts=100):
    """Tell of tokenising that goes on evenly for so many seconds."""
    for part in range(1, parts + 1):
        watch.now = seconds * part / parts
        progress.tokenising(total * part // parts, total)


def test_a_progress_line_fits_a_terminal():
    line = progress_line(RECORD, 200, 7000)
    assert line == "120/200 loss 2.346 lr 3.0e-04 grad 123 123k tok/s mfu 42% 130 GiB 1h56 left"
    assert len(progress_line(RECORD | {"step": 12_345}, 20_000, 7000)) <= 80
    short = progress_line({k: v for k, v in RECORD.items() if k != "mfu"}, 200, 7000)
    assert short == "120/200  loss 2.346  lr 3.0e-04  grad 123  123k tok/s  130 GiB  1h56 left"


def test_a_terminal_gets_one_line_that_is_updated():
    screen = Terminal()
    progress = Progress(200, stream=screen)
    for step in (1, 2, 3):
        progress.update(RECORD | {"step": step}, None)
    progress.say("done")
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().rpartition("\r")[2] == "done\n"


def test_quantities():
    assert [quantity(n) for n in (0.5, 950, 12_345, 4_560_000, 8e9)] == ["0.5", "950", "12.3k", "4.56M", "8B"]
    assert [duration(s) for s in (7, 750, 11_100)] == ["0:07", "12:30", "3h05"]

    assert [size(n) for n in (0, 950, 12_345_678, 4.56e9)] == ["0 B", "950 B", "12.3 MB", "4.56 GB"]


def test_a_line_of_tokenising():
    assert tokenising_line(0, 10**9, 0) == "tokenising    0% of 1 GB  0 B/s"
    assert tokenising_line(35 * 10**7, 10**9, 70) == "tokenising   35% of 1 GB  5 MB/s  2:10 left"
    assert len(tokenising_line(999 * 10**9, 123_456 * 10**9, 123_456)) <= 80


def test_tokenising_is_drawn_in_place_as_often_as_an_eye_can_follow():
    screen, watch = Terminal(), Watch()
    progress = Progress(10, stream=screen, clock=watch)
    reading(progress, watch, seconds=8, parts=400)
    drawn = screen.getvalue().split("\r")
    assert 60 < screen.getvalue().count("tokenising ") <= 80  # ten a second
    assert drawn[-1] == "tokenised 100 MB in 0:08\n" and screen.getvalue().count("\n") == 1


def test_tokenising_that_is_soon_done_leaves_nothing():
    screen, watch = Terminal(), Watch()
    progress = Progress(10, stream=screen, clock=watch)
    reading(progress, watch, seconds=2)
    progress.say("next")
    assert "\n" not in screen.getvalue().removesuffix("next\n")
    assert screen.getvalue().rpartition("\r")[2] == "next\n"


def test_a_log_has_a_line_for_each_tenth_of_what_takes_long():
    log, watch = io.StringIO(), Watch()
    reading(Progress(10, stream=log, clock=watch), watch, seconds=3)
    assert log.getvalue() == ""
    reading(Progress(10, stream=log, clock=watch), watch, seconds=203)  # three have passed
    lines = log.getvalue().splitlines()
    assert 9 <= len(lines) <= 11 and "\r" not in log.getvalue()
    assert lines[-1].startswith("tokenised 100 MB in ") and all(len(line) <= 80 for line in lines)


def test_quiet_says_nothing_at_all():
    for stream in (io.StringIO(), Terminal()):
        watch = Watch()
        progress = Progress(3, quiet=True, stream=stream, clock=watch)
        reading(progress, watch, seconds=100)
        for step in (1, 2, 3):
            progress.update(RECORD | {"step": step}, None)
        progress.say("done")
        progress.close()
        assert stream.getvalue() == ""


def test_a_log_has_about_twenty_lines_of_steps():
    log = io.StringIO()
    progress = Progress(1000, stream=log)
    for step in range(1, 1001):
        progress.update(RECORD | {"step": step}, None)
    assert log.getvalue().count("\n") == 21 and "\r" not in log.getvalue()


def test_it_is_what_open_data_calls(tmp_path):
    (tmp_path / "text.txt").write_text("some text. " * 1000)
    watch, log = Watch(), io.StringIO()
    progress = Progress(10, stream=log, clock=watch)
    watch.now = 9.0
    data = recipe.Data(source=str(tmp_path / "text.txt"), seq_len=16, cache="off")
    open_data(data, vocab_size=272, seed=0, progress=progress.tokenising)
    assert log.getvalue() == "tokenised 11 kB in 0:09\n"


def test_a_run_tells_of_the_text_that_it_tokenises(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("some text. " * 1000)
    recipe = tiny(f"data.source={tmp_path / 'text.txt'}", "train.steps=1")
    train(recipe)
    assert "tokenis" not in capsys.readouterr().out  # over before anybody wonders
    monkeypatch.setattr("ftrain.progress.PATIENCE_SECONDS", 0.0)
    train(recipe)
    assert "tokenised 11 kB in 0:0" in capsys.readouterr().out
    train(recipe, quiet=True)
    assert capsys.readouterr() == ("", "")
    validate(recipe)
    told = capsys.readouterr()
    assert told.out == "" and "tokenised 11 kB in 0:0" in told.err
