"""DataLoaders, Datasets and Hugging Face tables, taken wherever batches are."""

import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

import polymask as pm
from nets import SPEC, batch, tiny_base
from polymask.data.batches import as_batches
from polymask.train.fit import Listener

CLASSES = ["red", "green", "blue"]
RECIPE = {"epochs": 2, "batch_size": 8, "rate": 1e-2, "side": 16, "selection": "last"}


class Photos(Dataset):
    """Pillow images whose colour is their class, as torchvision's datasets give them."""

    classes = CLASSES

    def __init__(self, count: int = 30, transform=None) -> None:
        self.targets = [number % 3 for number in range(count)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int):
        pixels = np.random.default_rng(index).integers(0, 60, (20, 24, 3))
        pixels[..., self.targets[index]] += 150
        image = Image.fromarray(pixels.astype(np.uint8))
        return (self.transform(image) if self.transform else image), self.targets[index]


def shaken(image: Image.Image) -> torch.Tensor:
    """A float image with noise from each of the three global generators."""
    noise = random.random() + np.random.rand() + float(torch.rand(()))
    return SPEC.transform()(image) + noise


class Streamed(IterableDataset):
    """Images one after another, without a length."""

    def __iter__(self) -> Iterator:
        images, labels = batch(12)
        return iter(zip(images, labels.tolist(), strict=True))


class Stopper(Listener):
    """Ctrl-C after the first step of the second epoch."""

    def step(self, epoch, step, *rest):
        if (epoch, step) == (1, 1):
            signal.raise_signal(signal.SIGINT)


def same(first, second) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def float_set(count: int = 18) -> TensorDataset:
    return TensorDataset(*batch(count))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_a_loader_is_the_same_every_time_whatever_is_random_in_it(workers):
    loader = DataLoader(Photos(20, shaken), batch_size=6, shuffle=True, num_workers=workers)
    batches = as_batches(loader, SPEC, CLASSES, seed=3)
    here = as_batches(DataLoader(Photos(20, shaken), batch_size=6, shuffle=True), SPEC, CLASSES, seed=3)
    torch.manual_seed(5)
    first = list(batches.batches(1))
    assert len(first) == len(batches) == 4
    random.seed(1)
    assert same(batches.batches(1), first)
    assert same(batches.batches(1, 2), first[2:])
    assert same(here.batches(1), first), "workers make no difference"
    assert not same(batches.batches(2), first)


def test_reading_batches_leaves_the_random_numbers_of_training_alone():
    batches = as_batches(DataLoader(Photos(20, shaken), batch_size=6, shuffle=True), SPEC, CLASSES)
    torch.manual_seed(0)
    wanted = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    before = random.getstate()
    list(batches.batches())
    assert torch.equal(torch.rand(3), wanted[0])
    assert random.getstate() == before


def test_a_sampler_with_a_generator_of_its_own_repeats_and_keeps_its_state():
    generator = torch.Generator().manual_seed(9)
    sampler = RandomSampler(float_set(), generator=generator)
    batches = as_batches(DataLoader(float_set(), batch_size=5, sampler=sampler), SPEC, CLASSES)
    state = generator.get_state()
    assert same(batches.batches(0), list(batches.batches(0)))
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("kind", ["loader", "floats", "photos"])
def test_a_run_that_is_cut_in_an_epoch_goes_on_to_the_same_bits(kind, tmp_path):
    source = {
        "loader": lambda: DataLoader(Photos(24, shaken), batch_size=6, shuffle=True),
        "floats": float_set,
        "photos": lambda: Photos(24),
    }[kind]
    recipe = pm.get_recipe("quick", **RECIPE)

    def run(listener=None, **how):
        base = tiny_base()
        torch.manual_seed(0)
        domain = pm.new_domain(base, "affine-full", CLASSES)
        pm.fit(base, domain, source(), None, recipe, listener=listener, **how)
        return domain.stored()

    whole = run()
    file = tmp_path / "checkpoint.safetensors"
    with pytest.raises(pm.InterruptedTraining):
        run(Stopper(), checkpoint=file)
    again = run(checkpoint=file, resume=True)
    for name, tensor in whole.items():
        words, others = (t if isinstance(t, torch.Tensor) else t.words for t in (tensor, again[name]))
        assert torch.equal(words, others), name


def test_a_stream_trains_but_cannot_be_resumed(tmp_path):
    base, recipe = tiny_base(), pm.get_recipe("quick", **RECIPE)
    domain = pm.new_domain(base, "affine-full", CLASSES)
    history = pm.fit(base, domain, DataLoader(Streamed(), batch_size=5), None, recipe)
    assert len(history) == 2
    assert 0 <= pm.evaluate(base, domain, Streamed()) <= 100
    with pytest.raises(pm.TrainingError, match=r"DataLoader of Streamed cannot be resumed: a stream"):
        pm.fit(base, domain, DataLoader(Streamed(), batch_size=5), None, recipe, resume=True)


def test_a_sampler_that_never_repeats_cannot_be_resumed():
    class Odd(RandomSampler):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(range(self.passes % 3, 6))

    loader = DataLoader(float_set(6), batch_size=2, sampler=Odd(float_set(6)))
    with pytest.raises(pm.TrainingError, match="its sampler gives another order each time"):
        as_batches(loader, SPEC, CLASSES, resume=True)


def test_evaluate_agrees_on_a_loader_a_dataset_and_their_dict():
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full", CLASSES)
    floats = float_set(18)
    wanted = pm.evaluate(base, domain, DataLoader(floats, batch_size=7))
    assert pm.evaluate(base, domain, floats) == wanted
    assert pm.evaluate(base, domain, {"train": float_set(3), "test": floats}) == wanted
    assert pm.evaluate(base, domain, (float_set(3), floats)) == wanted
    raw = pm.evaluate(base, domain, Photos(12))
    ready = pm.evaluate(base, domain, Photos(12, SPEC.transform()))
    assert raw == ready == pm.evaluate(base, domain, DataLoader(Photos(12, SPEC.transform()), batch_size=5))


def test_labels_follow_the_names_of_classes():
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full", ["blue", "green", "red"])
    labels = torch.cat([labels for _, labels in as_batches(Photos(6), SPEC, domain.classes).batches()])
    assert labels.tolist() == [2, 1, 0, 2, 1, 0]
    with pytest.raises(pm.DataError, match="images of 'blue', which is no class of the domain"):
        as_batches(Photos(6), SPEC, ["red", "green"])


def test_learn_takes_datasets_and_cuts_one_that_is_alone():
    base, recipe = tiny_base(), pm.get_recipe("quick", **RECIPE | {"selection": "best", "epochs": 1})
    for data in (Photos(30), Photos(30, SPEC.transform()), Subset(Photos(40), range(30))):
        learned = pm.learn(base, data, "affine-full", recipe)
        assert learned.domain.classes == CLASSES
        assert learned.domain.input.shape == (3, 16, 16)
        assert learned.test_accuracy is not None
        assert learned.history[0].val_accuracy is not None


def test_learn_takes_loaders_as_parts_and_a_domain_has_the_size_of_their_images():
    base, recipe = tiny_base(), pm.get_recipe("quick", **RECIPE | {"selection": "best", "epochs": 1})
    images, labels = batch(12)
    larger = TensorDataset(torch.nn.functional.interpolate(images, size=20), labels)
    loaders = {"train": DataLoader(larger, batch_size=4, shuffle=True), "validation": DataLoader(larger, batch_size=6)}
    learned = pm.learn(base, loaders, "affine-full", recipe, classes=CLASSES)
    assert learned.domain.input.shape == (3, 20, 20)
    assert learned.test_accuracy is None
    with pytest.raises(pm.InputError, match="images are 3 × 16 × 16, but the domain takes 3 × 20 × 20"):
        pm.evaluate(base, learned.domain, DataLoader(float_set(), batch_size=4))
    with pytest.raises(pm.TrainingError, match="needs val"):
        pm.learn(base, DataLoader(larger, batch_size=4), "affine-full", recipe, classes=CLASSES)
    with pytest.raises(pm.DataError, match=r"does not name its classes; give classes=\["):
        pm.learn(base, loaders, "affine-full", recipe)


def test_fit_all_takes_datasets_in_lessons():
    base, recipe = tiny_base(), pm.get_recipe("quick", **RECIPE | {"epochs": 1})
    lessons = {
        "photos": pm.Lesson(CLASSES, Photos(12), test=Photos(6)),
        "tensors": pm.Lesson(CLASSES, (DataLoader(float_set(), batch_size=6), float_set(6))),
    }
    fitted = pm.fit_all(base, lessons, "affine-full", recipe)
    assert all(accuracy is not None for accuracy in fitted.final.values())
    assert fitted.domains["photos"].input.shape == (3, 16, 16)


def test_a_hugging_face_dataset_is_taken_as_it_is():
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    features = datasets.Features({"photo": datasets.Image(), "kind": datasets.ClassLabel(names=CLASSES)})
    photos = Photos(30)
    content = {"photo": [photos[i][0] for i in range(30)], "kind": photos.targets}
    table = datasets.Dataset.from_dict(content, features=features)
    base, recipe = tiny_base(), pm.get_recipe("quick", **RECIPE | {"selection": "best", "epochs": 1})
    learned = pm.learn(base, table, "affine-full", recipe)
    assert learned.domain.classes == CLASSES
    parts = datasets.DatasetDict({"train": table, "test": table.select(range(12))})
    again = pm.learn(base, parts, "affine-full", recipe)
    assert pm.evaluate(base, again.domain, parts) == again.test_accuracy
    assert pm.evaluate(base, again.domain, parts["test"]) == again.test_accuracy


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (7, "a int gives no batches; give a DataLoader or a Dataset"),
        ([], "the list is empty"),
        (DataLoader(Photos(4), batch_size=2), "a DataLoader cannot make batches .* give the Dataset itself"),
        ([(torch.zeros(3, 16, 16), 0, "name")], "list gives 3 things; give"),
        ([{"picture": torch.zeros(3, 16, 16), "label": 0}], r"has the columns 'picture', 'label'; call the .* 'image'"),
        ([(torch.zeros(3, 16, 16), 3)], "labels from 3 to 3 for 3 classes; number them from 0"),
        ([(torch.zeros(3, 16, 16), "pink")], "labels 'pink', which are no classes of the domain"),
        (
            [(torch.zeros(3, 16, 16), 0), (torch.zeros(3, 8, 8), 0)],
            "several sizes; resize them to 3 × 16 × 16",
        ),
        ([(torch.linspace(0, 255, 768).view(3, 16, 16), 0)], r"values from 0 to 255, but the domain \(3 × 16 × 16\)"),
    ],
)
def test_what_gives_no_batches_of_images_is_refused_with_a_remedy(source, problem):
    with pytest.raises(pm.PolymaskError, match=problem):
        as_batches(source, SPEC, CLASSES)


def test_data_with_a_part_of_another_name_or_kind_is_refused():
    base = tiny_base()
    with pytest.raises(pm.DataError, match="'training' is not a part of data; name the parts train, val and test"):
        pm.learn(base, {"training": Photos()})
    with pytest.raises(pm.DataError, match="data has test but no train"):
        pm.learn(base, {"test": Photos()})
    with pytest.raises(pm.DataError, match="val is a str; give a DataLoader"):
        pm.learn(base, (Photos(), "folder"))
