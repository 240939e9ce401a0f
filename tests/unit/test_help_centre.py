"""The demo collection is well-formed, and its questions find their articles with the real embedding model."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.cli.manifest import Manifest, load_manifest
from gateway.pipeline.contract import Contract, parse
from grid.config import Config
from grid.engines.embedding import OnnxEmbeddingEngine

FOLDER = Path(__file__).parents[2] / "examples/help-centre"
QUESTIONS: dict[str, list[dict[str, Any]]] = json.loads(
    (FOLDER / "questions.json").read_text(encoding="utf-8")
)
FOUND_AT_LEAST = 0.9


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return load_manifest(FOLDER / "manifest.json")


def published(manifest: Manifest) -> list[dict[str, Any]]:
    return [d for d in manifest.documents if d["metadata"]["status"] == "published"]


def test_articles_have_their_fields_and_length(manifest: Manifest) -> None:
    counts = Counter(document["id"] for document in manifest.documents)
    assert counts.most_common(1)[0][1] == 1
    for document in manifest.documents:
        title, text = document["text"].split("\n")
        assert document["metadata"].keys() == {"status", "topic", "updated", "title"}
        assert document["metadata"]["title"] == title
        assert 60 <= len(text.split()) <= 120, document["id"]


def test_drafts_contradict_published_articles(manifest: Manifest) -> None:
    texts = {document["id"]: document["text"] for document in manifest.documents}
    drafts = [document["id"] for document in manifest.documents if document["metadata"]["status"] == "draft"]
    assert len(drafts) >= 3
    assert all(draft.removesuffix("-draft") in texts for draft in drafts)


def test_only_the_published_article_holds_the_answer_of_a_demo_question(manifest: Manifest) -> None:
    texts = {document["id"]: document["text"] for document in manifest.documents}
    assert len(QUESTIONS["demo"]) == 3
    for item in QUESTIONS["demo"]:
        for fact in item["answer_contains"]:
            assert fact in texts[item["article"]]
            assert fact not in texts[f"{item['article']}-draft"]


def test_the_contract_is_one_that_the_gateway_takes() -> None:
    contract = parse(Contract, (FOLDER / "pipeline.json").read_bytes())
    assert contract.pipeline.retrievals[0].filter == {"status": "published"}
    generation = contract.pipeline.generation
    assert generation is not None
    assert generation.temperature == 0, "the demo's answers are checked, so they must be reproducible"


@pytest.mark.slow
async def test_questions_find_their_article_among_the_three_best(manifest: Manifest, tmp_path: Path) -> None:
    asked = [*QUESTIONS["demo"], *QUESTIONS["retrieval"]]
    documents = published(manifest)
    assert {item["article"] for item in asked} <= {document["id"] for document in documents}
    model = next(model for model in Config().models if model.engine == "embedding")
    engine = OnnxEmbeddingEngine(model, tmp_path)
    await engine.start()
    try:
        articles, _ = await engine.embed([document["text"] for document in documents])
        questions, _ = await engine.embed([item["question"] for item in asked])
    finally:
        await engine.close()
    best = np.argsort(-questions @ articles.T, axis=1)[:, :3]
    found = [
        item["article"] in {documents[index]["id"] for index in row}
        for item, row in zip(asked, best, strict=True)
    ]
    missed = [item["question"] for item, hit in zip(asked, found, strict=True) if not hit]
    assert all(found[: len(QUESTIONS["demo"])]), missed
    assert np.mean(found) >= FOUND_AT_LEAST, missed
