"""The documents of a file: JSON Lines, a JSON array, Parquet, or a directory of such files.

Documents are read one at a time. Lines can be read again by their number, so that the lines of a session that are far
apart need not be held in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from turnwise.errors import MALFORMED, BadLine, InvalidRequest
from turnwise.exchange.imports.values import value_of_json
from turnwise.types import Json

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
ROWS_AT_ONCE = 256


class Documents(Protocol):
    """Numbered documents, from 1 on."""

    def read(self) -> Iterator[tuple[int, Json | BadLine]]: ...


@runtime_checkable
class IndexedDocuments(Documents, Protocol):
    """Documents that can be read again by their number."""

    def get(self, number: int) -> Json: ...


def open_files(path: Path) -> list[tuple[Path, Documents]]:
    """Return the documents of a file, or of the files of a directory in the order of their names."""
    if not path.is_dir():
        return [(path, open_documents(path))]
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not found:
        raise InvalidRequest(f"the directory {str(path)!r} has no file with a name that ends in {', '.join(SUFFIXES)}")
    return [(file, open_documents(file)) for file in found]


def open_documents(path: Path) -> Documents:
    if path.suffix == ".parquet":
        return ParquetRows(path)
    if path.suffix != ".json" or not _is_one_text(path):
        return JsonLinesFile(path)
    return JsonArray(path)


class JsonLinesFile:
    """A file with one JSON object per line; empty lines are left out but counted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: list[int] = []

    def read(self) -> Iterator[tuple[int, Json | BadLine]]:
        self._offsets.clear()
        offset = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                self._offsets.append(offset)
                offset += len(line)
                if line.strip():
                    yield number, _document(line)

    def get(self, number: int) -> Json:
        with self._path.open("rb") as file:
            file.seek(self._offsets[number - 1])
            document = _document(file.readline())
        assert not isinstance(document, BadLine), "the line was a document when it was read first"
        return document


class JsonArray:
    """A file that is one JSON array, or one object over several lines, held in memory."""

    def __init__(self, path: Path) -> None:
        try:
            found = value_of_json(path.read_bytes())
            self._documents: list[Any] = found if isinstance(found, list) else [found]
        except BadLine as error:
            raise InvalidRequest(f"{str(path)!r} cannot be read: {error}; write one object a line") from error

    def read(self) -> Iterator[tuple[int, Json | BadLine]]:
        for number, document in enumerate(self._documents, 1):
            is_object = isinstance(document, dict)
            yield number, document if is_object else BadLine(f"{document!r:.80} is not a JSON object")

    def get(self, number: int) -> Json:
        document: Json = self._documents[number - 1]
        return document


class ParquetRows:
    """The rows of a Parquet file."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        try:
            self._file: Any = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise InvalidRequest(f"{str(path)!r} is not a Parquet file: {error}") from error

    def read(self) -> Iterator[tuple[int, Json | BadLine]]:
        number = 0
        for batch in self._file.iter_batches(batch_size=ROWS_AT_ONCE):
            for index in range(batch.num_rows):
                number += 1
                try:
                    yield number, _without_nulls(batch.slice(index, 1).to_pylist()[0])
                except MALFORMED as error:  # a text that is no UTF-8, or a time that Python does not know
                    yield number, BadLine(f"it cannot be read: {type(error).__name__}: {error}")


def _document(line: bytes) -> Json | BadLine:
    try:
        document = value_of_json(line)
    except BadLine as error:
        return error
    return document if isinstance(document, dict) else BadLine(f"{document!r:.80} is not a JSON object")


def _is_one_text(path: Path) -> bool:
    """Return whether a file is an array, or an object whose first line is only its beginning."""
    with path.open("rb") as file:
        first = next((line.strip() for line in file if line.strip(b" \t\r\n\xef\xbb\xbf")), b"")
    text = first.decode(json.detect_encoding(first), errors="replace").strip()
    return text.startswith("[") or text in ("{", "") or (text.startswith("{") and text.endswith((",", "{", "[")))


def _without_nulls(value: Any) -> Any:
    """Return a row without the nulls that Parquet has for each field that some other row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
