"""The constants that decide what counts as a change, in one place. docs/detection.md says why each is what it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """What a shift must show before it is called a change. Shifts are in units of the series' own noise (sigma).

    Attributes:
        smallest: relative change below which nobody acts; smaller shifts are never reported.
        noise_floor: relative noise that a series is assumed to have at least (clock and rounding).
        persistence: runs that a new level must have lasted.
        baseline: runs that must stand before the first change.
        z_shift: robust shift over its standard error, autocorrelation counted in.
        z_ranks: standardized Mann-Whitney statistic, for levels of at least ``young`` runs.
        young: a level shorter than this has not shown that it stays, so it must also stand clear of the noise:
        clear: by this many sigma, and
        visited: earlier runs that reached this share of the way to it count as visits, of which few are allowed,
        visits_window: among this many neighbouring runs.
        returns: added to ``z_shift`` for a level that was left again for the one before it.
        returns_persistence: runs that such a level must have lasted.
        modes: so many switches between the same two levels are how the machine is, and no change.
        drift_runs: a rise over fewer runs is a step.
        drift_margin: how much better (in BIC) a ramp must explain the runs than steps do.
        suspect: shift of the last runs, in standard errors, that asks for a re-run.
    """

    smallest: float = 0.005
    noise_floor: float = 1e-4
    persistence: int = 3
    baseline: int = 5
    z_shift: float = 4.5
    z_ranks: float = 3.9
    young: int = 10
    clear: float = 3.3
    visited: float = 0.7
    visits_window: int = 40
    returns: float = 0.7
    returns_persistence: int = 5
    modes: int = 5
    drift_runs: int = 8
    drift_margin: float = 10.0
    suspect: float = 4.0

    @property
    def least_runs(self) -> int:
        """Fewer finite runs than this cannot show a change."""
        return self.baseline + self.persistence


RULES = Rules()
