import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from polymask.data.split import decode_image, to_rgb
from polymask.errors import DataError


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def smooth(width: int = 30, height: int = 20) -> Image.Image:
    ramp = np.linspace(0, 255, width * height).reshape(height, width)
    return Image.fromarray(np.stack([ramp, ramp[::-1], 255 - ramp], axis=-1).astype(np.uint8))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_orientation_says(orientation: int) -> None:
    upright = smooth()
    back = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright if orientation == 1 else upright.transpose(back[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    seen = decode_image(encoded(stored, "PNG", exif=exif), "x")
    assert np.array_equal(seen, upright)


def test_an_orientation_that_does_not_exist_is_taken_as_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 99
    assert np.array_equal(decode_image(encoded(smooth(), "PNG", exif=exif), "x"), smooth())


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    rgb = np.asarray(decode_image(encoded(Image.fromarray(values), "PNG"), "x"))
    assert rgb.tolist() == [[[0] * 3, [1] * 3, [128] * 3, [255] * 3]]


def test_floats_from_zero_to_one_are_scaled_and_others_refused() -> None:
    values = np.array([[0.0, 0.2, 1.0]], dtype=np.float32)
    rgb = np.asarray(decode_image(encoded(Image.fromarray(values), "TIFF"), "x"))
    assert rgb[0, :, 0].tolist() == [0, 51, 255]
    for wrong in (values * 300, values * np.nan):
        with pytest.raises(DataError, match=r"heat\.tif.*8-bit or 16-bit"):
            decode_image(encoded(Image.fromarray(wrong), "TIFF"), "heat.tif")


def test_transparency_shows_white_in_every_mode_that_has_it() -> None:
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([255, 0, 0, 0, 0, 0])
    palette.putpixel((0, 0), 0)
    files = [
        encoded(clear, "PNG"),
        encoded(clear, "WEBP", lossless=True),
        encoded(palette, "PNG", transparency=1),
        encoded(palette, "PNG", transparency=bytes([255, 0])),
        encoded(palette, "GIF", transparency=1),
    ]
    for file in files:
        image = decode_image(file, "x")
        assert (image.getpixel((0, 0)), image.getpixel((2, 2))) == ((255, 0, 0), (255, 255, 255))
    half = decode_image(encoded(Image.new("LA", (2, 2), (0, 128)), "PNG"), "x")
    assert half.getpixel((0, 0)) == (127, 127, 127)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (6, 6), colour) for colour in ("red", "lime", "blue")]
    options = {"save_all": True, "append_images": frames[1:]}
    for form in ("GIF", "WEBP", "PNG"):
        extra = {"lossless": True} if form == "WEBP" else {}
        file = encoded(frames[0], form, **options, **extra)
        assert decode_image(file, "x").getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_every_usual_mode_becomes_rgb_of_the_same_size(mode: str) -> None:
    form = {"CMYK": "TIFF", "YCbCr": "JPEG"}.get(mode, "PNG")
    image = decode_image(encoded(smooth().convert(mode), form), "x")
    assert (image.mode, image.size) == ("RGB", (30, 20))


def test_a_cmyk_jpeg_keeps_its_colours() -> None:
    red = Image.new("RGB", (16, 16), (200, 30, 40))
    seen = decode_image(encoded(red.convert("CMYK"), "JPEG", quality=95), "x").getpixel((8, 8))
    assert np.abs(np.subtract(seen, (200, 30, 40))).max() < 12


def test_a_large_jpeg_is_decoded_small_but_not_below_what_is_needed() -> None:
    file = encoded(smooth(1600, 1200), "JPEG")
    assert decode_image(file, "x").size == (1600, 1200)
    small = decode_image(file, "x", side=100)
    assert small.size == (400, 300)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not an image"),
        (b"just words", "not an image"),
        (encoded(smooth(), "JPEG")[:-40], "damaged"),
        (encoded(smooth(), "PNG")[:60], "damaged"),
    ],
)
def test_an_unreadable_file_is_named_with_a_remedy(tmp_path: Path, content: bytes, complaint: str) -> None:
    file = tmp_path / "café.jpg"
    file.write_bytes(content)
    with pytest.raises(DataError, match=rf"café\.jpg.*{complaint}.*remove it"):
        decode_image(file, str(file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jpg: the file is missing"):
        decode_image(tmp_path / "gone.jpg", "gone.jpg")


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"bomb\.png.*make the image smaller"):
        decode_image(encoded(smooth(), "PNG"), "bomb.png")


@given(form=st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP"]), share=st.floats(0, 1))
def test_any_beginning_of_a_file_is_an_image_or_a_data_error(form: str, share: float) -> None:
    whole = encoded(smooth(), form)
    try:
        image = decode_image(whole[: int(share * len(whole))], "x")
    except DataError:
        return
    assert image.mode == "RGB"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I;16"])
def test_a_tall_image_is_converted_strip_by_strip_as_it_would_be_at_once(mode: str) -> None:
    draw = np.random.default_rng(0)
    if mode == "I;16":
        values = draw.integers(0, 65536, (700, 30), dtype=np.uint16)
        expected = np.repeat(np.round(values * (255 / 65535)).astype(np.uint8)[..., None], 3, 2)
        image = Image.fromarray(values)
    else:
        coloured = Image.fromarray(draw.integers(0, 256, (700, 30, 4), dtype=np.uint8), "RGBA")
        image = coloured.quantize(60) if mode == "P" else coloured.convert(mode)
        whole = image.convert("RGBA")
        expected = np.asarray(Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("RGB"))
    assert np.array_equal(np.asarray(to_rgb(image, "made")), expected)


@pytest.mark.parametrize("error", [TypeError("'IFDRational' object"), KeyError(273), ZeroDivisionError("rate")])
def test_whatever_a_decoder_stumbles_over_the_file_is_named(tmp_path, monkeypatch, error) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "odd.tiff")

    def stumble(self):
        raise error

    monkeypatch.setattr("PIL.TiffImagePlugin.TiffImageFile.load", stumble)
    with pytest.raises(DataError, match=r"odd.tiff: damaged .*restore or remove it"):
        decode_image(tmp_path / "odd.tiff", str(tmp_path / "odd.tiff"))
