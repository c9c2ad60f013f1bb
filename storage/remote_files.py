"""The files directly in a remote directory: one listing, and any range of their bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage import retries
from storage.backends import open_filesystem

VERSION_FIELDS = ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime")
"""What file systems call the version of an object, the best first."""

_OTHER_VERSION_FIELDS = ("md5Hash", "content_md5", "blob_id", "created")


@dataclass(frozen=True)
class RemoteFile:
    """One file of a listing; another `version` is another content."""

    name: str
    bytes: int
    version: str


class RemoteFiles:
    """The files in the directory behind a URL, as one listing found them.

    Raises:
        ValueError: the URL is of an unknown kind, or its file system is not installed.
        FileNotFoundError: there is no such directory, or no file in it.
        StoreError: the place cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self.directory = url.rstrip("/")
        self._filesystem, self._path = open_filesystem(self.directory)
        self._whole: dict[str, bytes] = {}
        # files of the hub are read through a buffer of megabytes unless told otherwise
        self._unbuffered = self.directory.startswith("hf://")
        self.listing: Mapping[str, RemoteFile] = self._list()
        """Each file by its name."""
        self.sizes: Mapping[str, int] = {name: file.bytes for name, file in self.listing.items()}
        """Bytes of each file, by name."""
        if not self.listing:
            raise FileNotFoundError(f"there are no files in {self.directory}")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file by one request, by default all; all are kept and not asked for again."""
        if (start, stop) != (0, None):
            return self._read(name, start, self.sizes[name] if stop is None else stop)
        if name not in self._whole:
            self._whole[name] = self._read(name, 0, self.sizes[name])
        return self._whole[name]

    def _read(self, name: str, start: int, stop: int) -> bytes:
        options: dict[str, Any] = {}
        if self._unbuffered:
            options = {"cache_type": "none", "size": self.sizes[name]}
        end = min(stop, self.sizes[name])
        if end <= start:
            return b""
        return bytes(
            self._call(
                "read",
                name,
                lambda: self._filesystem.cat_file(
                    f"{self._path}/{name}", start=start, end=end, **options
                ),
            )
        )

    def is_unchanged(self, file: RemoteFile) -> bool:
        """Whether the file is there still as the listing found it."""
        return self._list().get(file.name) == file

    def _list(self) -> dict[str, RemoteFile]:
        children = self._call("list", "", lambda: self._filesystem.ls(self._path, detail=True))
        files = [
            RemoteFile(info["name"].rsplit("/", 1)[-1], int(info["size"]), _version(info))
            for info in children
            if info["type"] == "file" and info["name"].strip("/") != self._path.strip("/")
        ]
        return {file.name: file for file in files}

    def _call(self, action: str, name: str, function: Any) -> Any:
        place = f"{self.directory}/{name}".rstrip("/")
        return retries.call(function, doing=f"{action} {place}", missing=FileNotFoundError)


def _version(info: Mapping[str, Any]) -> str:
    fields = (*VERSION_FIELDS, *_OTHER_VERSION_FIELDS)
    return str(next((info[field] for field in fields if info.get(field)), "")).strip('"')
