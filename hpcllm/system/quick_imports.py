"""Import many modules with few requests to the file system.

`import torch` asks for the state of a file or folder 19,000 times, on each rank, of a parallel file system that answers
one request after another:

    for each module        every folder of sys.path before its own: has it changed?    here: never; a folder is listed
                           its package's folder: has it changed?                        once, and searched in memory
                           its source: changed since it was compiled?                   as before
    for each operator      torch asks inspect for the module of a stack frame, which    here: by the name that the
    that it registers      resolves every part of the paths of all modules for that     frame's own globals have

What is not found in the listings, Python looks for by itself, so a file that has come since is found as ever, and so is
what lies in archives and namespace packages. A module is loaded by Python's own loaders: one whose source has changed
is compiled anew.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import ModuleType
from typing import Any

# in Python's own order
LOADERS = [
    *((suffix, ExtensionFileLoader) for suffix in EXTENSION_SUFFIXES),
    *((suffix, SourceFileLoader) for suffix in SOURCE_SUFFIXES),
    *((suffix, SourcelessFileLoader) for suffix in BYTECODE_SUFFIXES),
]
Listing = dict[str, "os.DirEntry[str]"]


class ListedFolders:
    """Finder of modules, for sys.meta_path, that lists each folder once."""

    def __init__(self) -> None:
        self._listings: dict[str, Listing | None] = {}

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Find a module as PathFinder would; None: let PathFinder look."""
        for folder in sys.path if path is None else path:
            listing = self._list(folder or os.getcwd())
            if listing is None:
                return None
            entry = listing.get(last := name.rpartition(".")[2])
            if entry and entry.is_dir():
                return self._package(name, entry.path)
            for suffix, loader in LOADERS:
                if (file := listing.get(last + suffix)) and file.is_file():
                    return importlib.util.spec_from_file_location(name, file.path, loader=loader(name, file.path))
        return None

    def invalidate_caches(self) -> None:
        """Forget the listings; importlib.invalidate_caches calls it."""
        self._listings.clear()

    def _package(self, name: str, folder: str) -> ModuleSpec | None:
        """Find the file of a package; None for a folder without one, which may be a part of a namespace."""
        listing = self._list(folder) or {}
        for suffix, loader in LOADERS:
            if (file := listing.get("__init__" + suffix)) and file.is_file():
                return importlib.util.spec_from_file_location(
                    name, file.path, loader=loader(name, file.path), submodule_search_locations=[folder]
                )
        return None

    def _list(self, folder: str) -> Listing | None:
        """List a folder; None if it cannot be, as an archive."""
        if folder not in self._listings:
            finder = pkgutil.get_importer(folder)
            self._listings[folder] = {} if finder is None else _read(folder) if type(finder) is FileFinder else None
        return self._listings[folder]


def _read(folder: str) -> Listing | None:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry for entry in entries}
    except OSError:
        return None


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import with few requests what is imported within."""
    finder, by_file = ListedFolders(), inspect.getmodule

    def by_name(thing: Any, file: str | None = None) -> ModuleType | None:
        if inspect.isframe(thing) and (module := sys.modules.get(thing.f_globals.get("__name__", ""))):
            return module
        return by_file(thing, file)

    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(place, finder)
    inspect.getmodule = by_name  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getmodule = by_file
        sys.meta_path.remove(finder)
