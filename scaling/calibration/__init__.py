"""Calibration of simulated servers to measured ones."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.calibration.calibrated_cost import make_calibrated_cost
    from scaling.calibration.closed_loops.closed_loop import (
        LOOP_PRIOR,
        LoopCoefficients,
        LoopCost,
        LoopLatency,
        find_loop_latency,
        make_loop_cost,
    )
    from scaling.calibration.closed_loops.goodput import (
        Goodput,
        LatencyLimits,
        find_goodput,
        make_replica,
        predict_request_joules,
    )
    from scaling.calibration.closed_loops.loop_calibration import (
        ENERGY_DISCREPANCY,
        INTERVAL_HALF,
        LOOP_DISCREPANCY,
        LOOP_LATENCIES,
        POWER_DISCREPANCY,
        ROOFLINE_LOOP,
        TAIL_DISCREPANCY,
        LoopCalibration,
        RowGain,
        ServerPrediction,
        calibrate_loops,
        predict_roofline,
        predict_servers,
        rank_rows,
    )
    from scaling.calibration.closed_loops.loop_files import (
        LOOP_FILE,
        PUBLISHED_LOOPS,
        draw_loop_posterior,
        format_loops,
        load_loops,
    )
    from scaling.calibration.closed_loops.measured_servers import (
        ENGINES,
        MeasuredServer,
        ServerTable,
        WeightFormat,
        find_server_form,
        read_measured_servers,
    )
    from scaling.calibration.closed_loops.pooled_fit import (
        EFFECTS,
        LoopFit,
        LoopPrediction,
        fit_loops,
        predict_loops,
        sizes_of_server,
    )
    from scaling.calibration.closed_loops.power import (
        JOULES_PER_KWH,
        PUBLISHED_POWER,
        PowerShares,
        RunEnergy,
        find_run_energy,
        find_used_shares,
        fit_power,
        predict_training_watts,
        predict_watts,
    )
    from scaling.calibration.closed_loops.row_costs import (
        RowWork,
        count_server,
        find_peak_share,
        stack_work,
    )
    from scaling.calibration.closed_loops.splits import (
        PUBLIC_SPLIT,
        ServerFold,
        digest_split,
        find_implausible_servers,
        split_servers,
    )
    from scaling.calibration.closed_loops.token_tails import (
        TAIL_LEVELS,
        TokenTail,
        fit_token_tail,
        predict_token_tails,
    )
    from scaling.calibration.load_sizes import (
        EXTRAPOLATION,
        LoadSizes,
        OutsideSize,
        SizeRange,
        find_outside_sizes,
        find_size_range,
        outside_variance,
    )
    from scaling.calibration.measurements import (
        LatencySummary,
        MeasuredStage,
        read_measured_stages,
    )
    from scaling.calibration.next_measurements import (
        MeasurementGain,
        rank_measurements,
    )
    from scaling.calibration.posterior import (
        DISCREPANCY,
        FIT_ROUNDS,
        STAGE_NOISE,
        LatencyFactors,
        ServerPosterior,
        draw_noise_scales,
        find_latency_factors,
        fit_posterior,
        leave_out,
        predict_stage,
        take_draws,
    )
    from scaling.calibration.posterior_files import (
        PUBLISHED_SERVERS,
        format_posterior,
        load_posterior,
        save_posterior,
    )
    from scaling.calibration.request_logs import (
        REQUEST_NOISE,
        RequestLog,
        fit_request_log,
        kolmogorov_distance,
        latencies_of,
        make_log_load,
        read_request_log,
    )
    from scaling.calibration.request_noise import (
        RequestNoise,
        find_request_noise,
        noise_quantile,
        tail_factor,
    )
    from scaling.calibration.server_cost import (
        COST_VERSION,
        DETERMINED_SPREAD,
        PRIOR,
        ServerCoefficients,
        ServerCost,
        draw_coefficients,
        find_deviations,
        make_server_cost,
    )
    from scaling.calibration.server_runs import (
        RequestLatencies,
        ServerRun,
        make_server_member,
        simulate_server,
    )
    from scaling.calibration.server_stages import (
        StageLatencies,
        compare_stage,
        make_stage_load,
        make_stage_setup,
        simulate_stage,
    )
    from scaling.calibration.servers import (
        WINDOW_S,
        ArrivalProcess,
        ServerLoad,
        ServerSetup,
        choose_warm_up_s,
        draw_arrivals,
        load_duration_s,
        make_server_load,
        num_kv_blocks,
    )
    from scaling.calibration.steady_state import (
        SteadyLoad,
        SteadyState,
        find_steady_state,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
