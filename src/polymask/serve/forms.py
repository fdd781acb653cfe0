"""multipart/form-data of a body in memory, whole or refused."""

from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from polymask.serve.refusal import Refusal

_FIELD_BYTES = 1024  # of a part that is no file


@dataclass
class Part:
    """One field of a form; a file where it has a file's name."""

    name: str = ""
    is_file: bool = False
    data: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        """The value of a part that is no file."""
        if len(self.data) > _FIELD_BYTES:
            raise Refusal(422, f"the field {self.name[:50]!r} is too long")
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Refusal(422, f"the field {self.name[:50]!r} is not UTF-8") from error


def parse_form(content_type: str, body: bytes, max_parts: int) -> list[Part]:
    """The parts of a form, in order."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise Refusal(400, "the form cannot be read: its Content-Type names no boundary")
    reader = _Reader(max_parts)
    try:
        parser = MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]
        parser.write(body)
    except FormParserError as error:
        raise Refusal(400, "the form cannot be read: it is malformed") from error
    if not reader.ended:
        raise Refusal(400, "the form cannot be read: it has no end")
    return reader.parts


class _Reader:
    """What the parser finds, put together."""

    def __init__(self, max_parts: int) -> None:
        self.parts: list[Part] = []
        self.ended = False
        self._max_parts = max_parts
        self._header, self._value = bytearray(), bytearray()

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._check_name,
            "on_part_data": lambda data, start, end: self.parts[-1].data.extend(data[start:end]),
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) >= self._max_parts:
            raise Refusal(422, f"the form has more than {self._max_parts} parts")
        self.parts.append(Part())

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self.parts[-1].name = options.get(b"name", b"").decode("utf-8", "replace")
            self.parts[-1].is_file = b"filename" in options
        self._header.clear()
        self._value.clear()

    def _check_name(self) -> None:
        if not self.parts[-1].name:
            raise Refusal(400, "the form cannot be read: a part has no name")

    def _end(self) -> None:
        self.ended = True
