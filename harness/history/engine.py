"""One history out of several stores, as a DuckDB view that queries ask; see :mod:`harness.history.query`.

``records`` has one row a record with the columns of :mod:`harness.history.flat`. ``places`` has one row a commit with
its rank along the chosen branch. A :class:`History` follows its stores: :meth:`History.refresh` takes in what is new.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from harness.errors import StoreError
from harness.history.compact import require_pyarrow
from harness.history.flat import columns
from harness.history.index import PLACE_COLUMNS, Index, Progress, Segment, Snapshot, state_of
from harness.history.order import Order, Repository, Seen, order_commits
from harness.history.store import Damage, Store

SQL_TYPES: Final = {"string": "VARCHAR", "float64": "DOUBLE", "int32": "INTEGER", "bool": "BOOLEAN"}
Row = dict[str, Any]
T = TypeVar("T")


class History:
    """The records of some stores.

    Args:
        stores: read together; a record that several hold counts once.
        repository: where commits are ordered; None orders by declared dates.
        branch: whose line of commits is looked at.
        cache: the folder for indexes, else the user's cache.
        threads, memory: limits of the query engine.

    Raises:
        StoreError: DuckDB or PyArrow is missing, or a store cannot be listed.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        repository: Repository | None = None,
        branch: str = "HEAD",
        cache: Path | None = None,
        threads: int = 2,
        memory: str = "1GB",
    ) -> None:
        try:
            import duckdb
        except ImportError as err:
            raise StoreError("queries need DuckDB: pip install 'pairbench[history]'") from err
        require_pyarrow()
        self.stores = tuple(stores)
        self.repository = repository
        self.branch = branch
        self._indexes = [Index(store, cache) for store in self.stores]
        self._connection = duckdb.connect(":memory:")
        self._connection.execute(f"SET threads = {int(threads)}")
        self._connection.execute("SET memory_limit = ?", [memory])
        self._connection.execute("SET preserve_insertion_order = false")
        self._lock = threading.RLock()
        self._state = ""
        self._kept: dict[str, Any] = {}
        self.damage: list[Damage] = []
        self.duplicates = 0
        self.order = Order(branch)

    def state(self) -> str:
        """A fingerprint of all stores and of the branch's tip as they are now; cheap, so ask before every view."""
        states = [state_of(store.entries()) for store in self.stores]
        return "-".join([*states, self._tip() or ""])

    def _tip(self) -> str | None:
        return self.repository.resolve(self.branch) if self.repository is not None else None

    def refresh(self, progress: Progress | None = None) -> bool:
        """Take in what is new; True when anything was.

        Raises:
            StoreError: a store cannot be listed, or the commits cannot be ordered.
            UsageError: the branch does not exist.
        """
        with self._lock:
            tip = self._tip()
            snapshots = [index.refresh(progress) for index in self._indexes]
            state = "-".join([*(snapshot.state for snapshot in snapshots), tip or ""])
            if state == self._state:
                return False
            self._make_views(snapshots)
            self.damage = [item for snapshot in snapshots for item in snapshot.damage]
            self._make_order()
            self._make_latest()
            self._kept.clear()
            self._state = state
            return True

    def _make_views(self, snapshots: Sequence[Snapshot]) -> None:
        segments = [segment for snapshot in snapshots for segment in snapshot.segments]
        execute = self._connection.execute
        selects = [_select(group) for group in _grouped(segments)] or [_empty()]
        execute(f"CREATE OR REPLACE VIEW everything AS {' UNION ALL BY NAME '.join(selects)}")
        execute("CREATE OR REPLACE TABLE twice (place VARCHAR, row_number BIGINT)")
        kept = self._indexes[0].folder / "twice.json" if self._indexes else None
        state = "-".join(snapshot.state for snapshot in snapshots)
        twice = _read_twice(kept, state)
        if twice is None:
            twice = [[row["place"], row["row_number"]] for row in self.rows(TWICE)]
            _keep_twice(kept, state, twice)
        if twice:
            places, numbers = [item[0] for item in twice], [item[1] for item in twice]
            execute("INSERT INTO twice SELECT unnest(?::VARCHAR[]), unnest(?::BIGINT[])", [places, numbers])
        self.duplicates = len(twice)
        condition = (
            "WHERE NOT EXISTS (FROM twice AS t WHERE t.place = e.place AND t.row_number = e.row_number)"
            if self.duplicates
            else ""
        )
        execute(f"CREATE OR REPLACE VIEW records AS SELECT * FROM everything AS e {condition}")

    def _make_order(self) -> None:
        seen = [
            Seen(row["commit"], row["date"], row["subject"], row["first"])
            for row in self.rows(
                'SELECT "commit", any_value(commit_date) AS date, any_value(commit_subject) AS subject, '
                'min("time") AS first FROM records WHERE "commit" IS NOT NULL GROUP BY "commit"'
            )
        ]
        self.order = order_commits(seen, self.repository, self.branch)
        places = list(self.order.places.values())
        columns = [
            [place.commit for place in places],
            [place.rank for place in places],
            [place.standing for place in places],
            [place.side for place in places],
        ]
        self._connection.execute(
            'CREATE OR REPLACE TABLE places AS SELECT unnest(?::VARCHAR[]) AS "commit", unnest(?::BIGINT[]) AS rank, '
            "unnest(?::VARCHAR[]) AS standing, unnest(?::BOOLEAN[]) AS side",
            columns,
        )

    def _make_latest(self) -> None:
        """``latest``: of each variant on each workload as it is defined now the newest record, a clean one on the line
        before any other."""
        self._connection.execute(
            f"CREATE OR REPLACE TABLE latest AS SELECT r.*, p.rank, p.standing FROM records AS r "
            f"JOIN ({LATEST_PLACES}) AS l ON r.place = l.newest.place AND r.row_number = l.newest.row_number "
            f'LEFT JOIN places AS p ON p."commit" = r."commit"'
        )

    def once(self, name: str, compute: Callable[[History], T]) -> T:
        """What ``compute`` gives, kept until the history changes; it is shared, so do not change it."""
        with self._lock:
            if name not in self._kept:
                self._kept[name] = compute(self)
            kept: T = self._kept[name]
            return kept

    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """The result of a query as plain mappings; safe from several threads.

        Raises:
            StoreError: the query failed, as when a file was removed under it; refresh and ask again.
        """
        import duckdb

        for last in (False, True):
            try:
                with self._connection.cursor() as cursor:
                    result = cursor.execute(sql, parameters or None)
                    names = [item[0] for item in result.description]
                    return [dict(zip(names, values, strict=True)) for values in result.fetchall()]
            except duckdb.IOException as err:
                # A file went away under us: take in what took its place, once.
                if last or not self._state or not self.refresh():
                    raise StoreError(f"the history changed while it was read: {err}") from err
        raise AssertionError("unreachable")

    def arrow(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        """The result of a query as a PyArrow table."""
        with self._connection.cursor() as cursor:
            return cursor.execute(sql, parameters or None).to_arrow_table()

    def lines(self, where: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Whole records, raw samples included, in the order that they were written; keep ``where`` narrow.

        Raises:
            StoreError: a file that held one cannot be read any more.
        """
        rows = self.rows(
            f'SELECT store, holder, file, number, line FROM records WHERE {where} ORDER BY "time", file, number',
            parameters,
        )
        wanted: dict[tuple[str, str], set[tuple[str, int]]] = {}
        for row in rows:
            if row["line"] is None:
                wanted.setdefault((row["store"], row["holder"]), set()).add((row["file"], row["number"]))
        fetched: dict[tuple[str, str, str, int], dict[str, Any]] = {}
        for (url, holder), places in wanted.items():
            for file, number, record in Store(url).scan_file(holder, []):
                if (file, number) in places:
                    fetched[url, holder, file, number] = record
        records = []
        for row in rows:
            if row["line"] is not None:
                records.append(dict(json.loads(row["line"])))
            elif found := fetched.get((row["store"], row["holder"], row["file"], row["number"])):
                records.append(found)
        return records

    def close(self) -> None:
        """Let go of everything."""
        self._connection.close()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: Place of the newest record of every series. A clean record on the line comes before a dirty one, whatever the dates.
#: A workload that was defined anew under its name takes the place of what the name stood for before, in every variant.
LATEST_PLACES: Final = """
    SELECT newest FROM (
        SELECT max_by({'place': place, 'row_number': row_number}, age) AS newest, max(age) AS age,
               max_by(workload, age) AS workload, technique, workload_id, dtype, gpu, ranks
        FROM (SELECT r.*, ((NOT coalesce(dirty, true))::BIGINT * 4194304 + coalesce(p.rank, 0)) * 4294967296
                          + coalesce(epoch(TRY_CAST("time" AS TIMESTAMP))::BIGINT, 0) AS age
              FROM records AS r LEFT JOIN places AS p ON p."commit" = r."commit" WHERE type = 'measurement')
        GROUP BY technique, variant, workload_id, dtype, gpu, ranks)
    QUALIFY workload_id IS NOT DISTINCT FROM
            max_by(workload_id, age) OVER (PARTITION BY technique, workload, dtype, gpu, ranks)
"""


#: Where a record lies that an earlier place holds already.
TWICE: Final = (
    "SELECT place, row_number FROM (SELECT place, row_number, row_number() OVER (PARTITION BY id ORDER BY place, "
    "row_number) AS n FROM everything WHERE id IN (SELECT id FROM everything GROUP BY id HAVING count(*) > 1)) "
    "WHERE n > 1"
)


def _read_twice(path: Path | None, state: str) -> list[list[Any]] | None:
    """The duplicates found before in this very state; looking for them reads every id."""
    try:
        found = json.loads(path.read_bytes()) if path is not None else {}
        return list(found["rows"]) if found["state"] == state else None
    except (OSError, ValueError, KeyError, TypeError):  # never kept, or by another version
        return None


def _keep_twice(path: Path | None, state: str, rows: list[list[Any]]) -> None:
    if path is None:
        return
    temporary = path.with_name(f".twice.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(json.dumps({"state": state, "rows": rows}))
        temporary.replace(path)
    except OSError:  # a full cache costs the next reader half a second, no more
        temporary.unlink(missing_ok=True)


def quote(text: str) -> str:
    """A string as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def _columns_sql() -> dict[str, str]:
    names = dict([*columns(), *PLACE_COLUMNS.items(), ("line", "string")])
    return {name: SQL_TYPES[kind] for name, kind in names.items()}


def _grouped(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments that one SELECT can read together: compacted files of a store, segments with nothing left out."""
    groups: dict[tuple[bool, tuple[str, ...]], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((bool(segment.store), segment.stale), []).append(segment)
    return list(groups.values())


def _select(group: Sequence[Segment]) -> str:
    paths = ", ".join(quote(str(segment.path)) for segment in group)
    present = set(_present(group))
    items = []
    for name, kind in _columns_sql().items():
        if name in present:
            items.append(f'"{name}"')
        elif name == "store" and group[0].store:
            items.append(f"CAST({quote(group[0].store)} AS VARCHAR) AS store")
        else:
            items.append(f'CAST(NULL AS {kind}) AS "{name}"')
    stale = group[0].stale
    where = f" WHERE holder NOT IN ({', '.join(quote(name) for name in stale)})" if stale else ""
    return (
        f"SELECT {', '.join(items)}, filename AS place, file_row_number AS row_number "
        f"FROM read_parquet([{paths}], union_by_name = true, filename = true, file_row_number = true){where}"
    )


def _present(group: Sequence[Segment]) -> list[str]:
    parquet = require_pyarrow()
    names: dict[str, None] = {}
    for segment in group:
        names.update(dict.fromkeys(parquet.read_schema(segment.path).names))
    return list(names)


def _empty() -> str:
    items = [f'CAST(NULL AS {kind}) AS "{name}"' for name, kind in _columns_sql().items()]
    return f"SELECT {', '.join(items)}, '' AS place, CAST(0 AS BIGINT) AS row_number WHERE false"


def open_history(
    stores: Sequence[Store],
    repository: Repository | None = None,
    branch: str = "HEAD",
    progress: Progress | None = None,
) -> History:
    """A refreshed :class:`History`.

    Raises:
        StoreError, UsageError: as :meth:`History.refresh`.
    """
    history = History(stores, repository, branch)
    history.refresh(progress)
    return history


def as_object(text: str | None) -> dict[str, Any]:
    """A column that holds an object as JSON text; empty for none."""
    return dict(json.loads(text)) if text else {}
