"""Training of one small model, resumable bit for bit."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.training.architectures import (
        count_model_parameters,
        resize_model,
        serving_config,
        training_flops,
        transformer,
    )
    from scaling.training.consistency import Consistency, Trajectory, make_records
    from scaling.training.drafting_heads import (
        HeadRecipe,
        acceptance_rates,
        train_heads,
    )
    from scaling.training.meshes import (
        check_trainable,
        gather_tree,
        make_training_mesh,
        place_training_tree,
        tree_specs,
    )
    from scaling.training.objectives import (
        NEXT_TOKEN,
        MultiTokenPrediction,
        StreamScore,
        TrainingObjective,
        score_documents,
        score_stream,
        stream_windows,
        token_losses,
    )
    from scaling.training.optimizers import make_optimizer
    from scaling.training.parallel import divided_gradient
    from scaling.training.pipeline import make_pipeline_schedule
    from scaling.training.recipes import (
        LearningRateSchedule,
        OptimizerConfig,
        ScheduleName,
        StepConfig,
        TrainConfig,
        steps_taken,
    )
    from scaling.training.recurrent import Architecture, RecurrentConfig
    from scaling.training.step import TrainState, compiled_steps, init_train_state
    from scaling.training.training_loop import (
        TrainResult,
        restore_checkpoint,
        save_checkpoint,
        train,
        train_in_memory,
    )
    from scaling.training.transformer_rows import layer_activity

__all__, __getattr__, __dir__ = lazy_exports(__name__)
