"""Pictures of coloured shapes and a word, and true sentences about them."""

from dataclasses import dataclass
from itertools import permutations
from random import Random

from PIL import Image, ImageDraw

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 170),
    "orange": (240, 140, 30),
    "black": (20, 20, 20),
    "brown": (130, 80, 40),
}
BACKGROUNDS = {"white": (255, 255, 255), "grey": (200, 200, 200), "pink": (255, 215, 225)}
SHAPES = ("circle", "square", "triangle", "diamond")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")
WORDS = ("apple", "bridge", "cloud", "door", "eagle", "forest", "garden", "house", "island", "lamp", "moon", "river")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A shape in one of nine cells."""

    shape: str
    color: str
    is_large: bool
    row: int
    column: int

    @property
    def name(self) -> str:
        return f"{'large' if self.is_large else 'small'} {self.color} {self.shape}"

    @property
    def place(self) -> str:
        return f"{ROWS[self.row]} {COLUMNS[self.column]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One picture."""

    background: str
    figures: tuple[Figure, ...]
    word: str | None
    word_cell: tuple[int, int]
    """(row, column) of the word."""


def random_scene(random: Random, *, least: int = 1) -> Scene:
    """Return a scene of `least` to six figures, each in a cell of its own, and in every second scene a word."""
    word_cell, *cells = random.sample(
        [(row, column) for row in range(3) for column in range(3)], random.randint(least + 1, 7)
    )
    figures = tuple(
        Figure(
            shape=random.choice(SHAPES),
            color=random.choice(tuple(COLORS)),
            is_large=random.random() < 0.5,
            row=row,
            column=column,
        )
        for row, column in cells
    )
    word = random.choice(WORDS) if random.random() < 0.5 else None
    return Scene(background=random.choice(tuple(BACKGROUNDS)), figures=figures, word=word, word_cell=word_cell)


def draw(scene: Scene, width: int, height: int) -> Image.Image:
    """Draw the scene as a picture of `width` x `height` pixels."""
    image = Image.new("RGB", (width, height), BACKGROUNDS[scene.background])
    canvas = ImageDraw.Draw(image)
    for figure in scene.figures:
        _draw_figure(canvas, figure, width / 3, height / 3)
    if scene.word:
        row, column = scene.word_cell
        canvas.text((column * width / 3 + 1, row * height / 3 + 1), scene.word, fill=(0, 0, 0))
    return image


def _draw_figure(canvas: ImageDraw.ImageDraw, figure: Figure, cell_width: float, cell_height: float) -> None:
    x, y = (figure.column + 0.5) * cell_width, (figure.row + 0.5) * cell_height
    radius = min(cell_width, cell_height) * (0.48 if figure.is_large else 0.28)
    fill = COLORS[figure.color]
    match figure.shape:
        case "circle":
            canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        case "square":
            canvas.rectangle((x - radius, y - radius, x + radius, y + radius), fill=fill)
        case "triangle":
            canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=fill)
        case "diamond":
            canvas.polygon([(x, y - radius), (x - radius, y), (x, y + radius), (x + radius, y)], fill=fill)


def facts(scene: Scene, random: Random) -> list[str]:
    """True sentences about the picture, in random order."""
    sentences = [f"The background is {scene.background}.", _count(scene)]
    sentences += [f"At the {figure.place} there is a {figure.name}." for figure in scene.figures]
    sentences += [
        f"The {one.name} is {relation} the {other.name}."
        for one, other in permutations(scene.figures, 2)
        for relation, holds in (("left of", one.column < other.column), ("above", one.row < other.row))
        if holds
    ]
    if scene.word:
        sentences.append(f'The word "{scene.word}" is written in it.')
    random.shuffle(sentences)
    return sentences


def questions(scene: Scene, random: Random) -> list[tuple[str, str]]:
    """Questions about the picture with their answers, in random order."""
    asked = [("How many shapes are there?", _count(scene)), ("What is the background?", f"It is {scene.background}.")]
    for figure in scene.figures:
        asked.append((f"What is at the {figure.place}?", f"A {figure.name}."))
        asked.append((f"Which colour has the shape at the {figure.place}?", f"It is {figure.color}."))
    written = f'The word "{scene.word}".' if scene.word else "No word is written."
    asked.append(("Which word is written?", written))
    random.shuffle(asked)
    return asked


def _count(scene: Scene) -> str:
    count = len(scene.figures)
    return "There is one shape." if count == 1 else f"There are {NUMBERS[count]} shapes."
