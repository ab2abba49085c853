"""Commands: cost, plan, simulate, calibrate, train, sweep, fit, compare, next."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.cli.calibrate.result import (
        END_TO_END,
        FIRST_TOKEN,
        CalibrationResult,
    )
    from scaling.cli.calibrate.server_report import SERVER_TABLES
    from scaling.cli.calibrate.server_results import (
        FIRST_TOKEN_TIME,
        TIME_PER_TOKEN,
        TOKEN_ENERGY,
        ServerTablesResult,
    )
    from scaling.cli.calibrate.server_tables import (
        ServerTablesConfig,
        find_public_tables,
        predict_server_tables,
    )
    from scaling.cli.calibrate.study import (
        STUDY,
        CalibrationConfig,
        find_measured_runs,
        find_published,
    )
    from scaling.cli.fit.config import FitConfig
    from scaling.cli.fit.drawing import draw_isoflop_groups
    from scaling.cli.fit.fitting import fit_log
    from scaling.cli.fit.grids import optimum_at
    from scaling.cli.fit.report import frontier_json
    from scaling.cli.fit.result import LogFits
    from scaling.cli.plan.serving import (
        ReplicaKind,
        ServedLoad,
        ServedSizes,
        serve_designs,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
