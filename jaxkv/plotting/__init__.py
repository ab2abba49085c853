"""Style of figures, and shared drawing functions."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.plotting.boxes import (
        BOX_GREY,
        COPY,
        GHOST,
        SMALL_FONT,
        TEXT_COLOR,
        Box,
        draw_arrow,
        draw_frame,
        draw_rectangle,
        draw_reference_count,
        draw_tag,
        draw_text,
        draw_words,
        fill_stripes,
        lighten,
        slot_color,
    )
    from jaxkv.plotting.style import (
        FONT_POINTS,
        PANEL_SIZE_INCHES,
        Panels,
        annotate,
        draw_curve,
        draw_reference_line,
        draw_ridge,
        draw_with,
        label_log_axis,
        label_wide_log_axis,
        render_figure,
        sequential_colors,
        set_labels,
        shade_band,
        use_powers_of_two,
    )
    from jaxkv.plotting.systems import (
        BLACK,
        BLUE,
        GREEN,
        ORANGE,
        PURPLE,
        RED,
        SKY,
        SYSTEM_STYLES,
        colors,
        system_style,
    )
    from jaxkv.plotting.timelines import draw_slots

__all__, __getattr__, __dir__ = lazy_exports(__name__)
