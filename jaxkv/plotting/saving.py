"""Files of a figure: SVG, PNG and PDF, scaled to the printed size."""

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PNG_DPI = 200
"""Pixels per printed inch."""
LARGE_BYTES = 40_000
"""PNG size from which the number of colours is reduced."""


def save_figure(
    figure: "Figure", name: str, scale: float, has_pdf: bool
) -> dict[str, bytes]:
    """Returns the SVG, the PNG and on request the PDF of a figure by file name.

    Args:
      figure: an arranged figure.
      name: file name without suffix.
      scale: printed size over the size of the figure.
      has_pdf: True to write a PDF.
    """
    svg = io.BytesIO()
    png = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=PNG_DPI * scale)
    if len(png.getvalue()) >= LARGE_BYTES:  # 128 colours take a third of the size
        from PIL import Image

        image = Image.open(png).convert("RGB")
        png = io.BytesIO()
        image.quantize(128, dither=Image.Dither.NONE).save(png, "png")
    scaled = re.sub(  # the viewBox keeps the coordinates
        rb'\b(width|height)="([\d.]+)pt"',
        lambda match: b'%b="%gpt"' % (match[1], scale * float(match[2])),
        svg.getvalue(),
        count=2,
    )
    files = {f"{name}.svg": scaled, f"{name}.png": png.getvalue()}
    if has_pdf:
        from matplotlib.backends.backend_pdf import Op, PdfFile, PdfPages

        class ScaledFile(PdfFile):
            def newPage(self, width: float, height: float) -> None:
                super().newPage(scale * width, scale * height)
                self.output(scale, 0, 0, scale, 0, 0, Op.concat_matrix)

        pdf = io.BytesIO()
        pages = PdfPages(pdf)
        pages._file = ScaledFile(pdf, metadata={"CreationDate": None})
        pages.savefig(figure)
        pages.close()
        files[f"{name}.pdf"] = pdf.getvalue()
    return files
