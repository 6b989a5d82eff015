"""A stream is divided among ranks: each row of it belongs to one rank, and none ends before the others."""

from itertools import islice
from types import SimpleNamespace

import pytest
from datasets import Dataset, IterableDataset
from transformers import Trainer as PlainTrainer

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.scripting import streams
from hf_fsdp_tools.scripting.streams import StreamMixin, check_divided_once, share_of_stream


def rows_of(files: list[int], count: int):
    for file in files:
        for row in range(count):
            yield {"text": f"{file}-{row}"}


def stream(files: int, count: int = 7) -> IterableDataset:
    return IterableDataset.from_generator(rows_of, gen_kwargs={"files": list(range(files)), "count": count})


def share(monkeypatch, rank: int, ranks: int, given: IterableDataset, **options) -> IterableDataset:
    monkeypatch.setattr(streams, "rank_and_size", lambda: (rank, ranks))
    return share_of_stream(given, **options)


def texts(part: IterableDataset, count: int) -> list[str]:
    return [row["text"] for row in islice(part, count)]


@pytest.mark.parametrize(("files", "ranks"), [(1, 2), (3, 2), (2, 2), (4, 2), (6, 3), (4, 3)])
def test_each_row_belongs_to_one_rank_and_no_rank_ends(files, ranks, monkeypatch):
    held_out = [{"text": "0-0"}, {"text": "0-3"}]
    given = stream(files).skip(2)  # as rows are held out of a stream
    shares = []
    for rank in range(ranks):
        endless = texts(share(monkeypatch, rank, ranks, given, held_out=held_out), 200)
        assert len(endless) == 200
        turn = endless.index(endless[0], 1)
        assert endless[:turn] == endless[turn : 2 * turn], "again in the same order"
        shares.append(set(endless))
    assert sum(map(len, shares)) == len(set.union(*shares)), "no row belongs to two ranks"
    assert not set.union(*shares) & {"0-0", "0-3"}
    sizes = sorted(map(len, shares))
    assert sizes[-1] - sizes[0] <= 3, "nearly as many rows for each"
    assert len(set.union(*shares)) >= 7 * files - 4


def test_a_rank_with_files_of_its_own_reads_no_other(monkeypatch):
    read = texts(share(monkeypatch, 1, 2, stream(4)), 50)
    assert {text[0] for text in read} == {"2", "3"}


def test_the_column_may_have_another_name(monkeypatch):
    renamed = stream(2).rename_column("text", "content")
    left = share(monkeypatch, 0, 1, renamed, held_out=[{"content": "0-0"}], columns={"content", "messages"})
    assert "0-0" not in {row["content"] for row in islice(left, 30)}


def test_a_conversation_that_is_held_out_is_not_trained_on(monkeypatch):
    chats = [[{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}] for n in range(6)]
    chats[1][0]["name"] = "Ada"  # a key that Arrow gives all turns of a data set
    rows = [{"messages": chats[n], "id": place} for place, n in enumerate([0, 1, 2, 3, 4, 5, 0, 1])]
    held_out = Dataset.from_list(rows[:2])
    given = IterableDataset.from_generator(lambda: iter(rows))
    left = share(monkeypatch, 0, 1, given, held_out=held_out, columns={"text", "messages"})
    assert {row["id"] for row in islice(left, 20)} == {2, 3, 4, 5}


def test_a_share_of_a_stream_is_not_divided_again():
    class Trainer(StreamMixin, PlainTrainer):
        pass

    args = SimpleNamespace(train_batch_size=2, dataloader_num_workers=0, dataloader_pin_memory=False)
    trainer = SimpleNamespace(train_dataset=stream(1, 5), args=args, data_collator=lambda rows: [*rows])
    batches = [[row["text"] for row in batch] for batch in Trainer.get_train_dataloader(trainer)]
    assert batches == [["0-0", "0-1"], ["0-2", "0-3"], ["0-4"]]


def test_a_trainer_that_would_divide_a_share_again_is_refused():
    with pytest.raises(ConfigError, match=r"class SimpleNamespace\(StreamMixin, FSDPTrainerMixin"):
        check_divided_once(SimpleNamespace(train_dataset=stream(1, 5)))
    check_divided_once(SimpleNamespace(train_dataset=[{"text": "a"}]))


def test_a_rank_without_rows_is_an_error_before_training(monkeypatch):
    with pytest.raises(ConfigError, match=r"rank 2 of 3 has no row to train on.*fewer processes"):
        share(monkeypatch, 2, 3, stream(1, count=2))
    with pytest.raises(ConfigError, match=r"train on: 5 different rows are held out.* or --eval_strategy no"):
        share(monkeypatch, 0, 1, stream(1, count=5), held_out=list(stream(1, count=5)))
