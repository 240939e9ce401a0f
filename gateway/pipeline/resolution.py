"""Which model a contract's name stands for, and whether a query is embedded as its data source was. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.pipeline.contract import Contract, GenerationStep, QueryEmbedding, RetrievalStep
from gateway.records import DataSourceRecord
from grid.config import Config
from grid.errors import InvalidRequest
from grid.words import Task


def stands_for(name: str, config: Config) -> str:
    """Return the model that the alias `name` stands for; any other name stands for itself."""
    alias = config.aliases.get(name)
    return name if alias is None else alias.model


def served(name: str, config: Config, task: Task, param: str) -> str:
    """Return the cell's model for `task` that `name` stands for. Raises InvalidRequest naming `param`."""
    models, model = _models(config, task), stands_for(name, config)
    if model in models:
        return model
    kind = "embeds" if task is Task.EMBED else "generates"
    known = ", ".join(models) or "none"
    raise InvalidRequest(
        f"{param}: this cell has no model {name[:128]!r} that {kind}; it has {known}, and the aliases of the "
        "configuration",
        param=param,
    )


def check_models(contract: Contract, config: Config) -> None:
    """Raises InvalidRequest, naming the step's field, for a model that the cell doesn't have."""
    for index, step in enumerate(contract.pipeline.steps):
        if isinstance(step, GenerationStep):
            served(step.model, config, Task.GENERATE, f"pipeline.steps[{index}].model")
        elif step.query_embedding is not None:
            asked = step.query_embedding.model
            if asked not in config.aliases:
                served(asked, config, Task.EMBED, f"pipeline.steps[{index}].query_embedding.model")


def check_sources(contract: Contract, sources: Mapping[str, DataSourceRecord], config: Config) -> None:
    """Raises InvalidRequest, naming the step's field, for a query that can't be embedded as its data source
    was. `sources` holds those that exist already, by step id."""
    for index, step in enumerate(contract.pipeline.steps):
        if not isinstance(step, RetrievalStep) or step.query_embedding is None:
            continue
        source = sources.get(step.id or "")
        if source is not None:
            param = f"pipeline.steps[{index}].query_embedding"
            check_query_embedding(step.query_embedding, param, source, config)


def check_query_embedding(
    asked: QueryEmbedding, param: str, source: DataSourceRecord, config: Config
) -> list[str]:
    """Return warnings on how a query of `source` is embedded; raises InvalidRequest where it can't be.

    Queries are embedded as the documents were. Where the grid embedded those, a contract may name another
    provider's model by an alias, and the alias may say that its vector length is ignored. Vectors that
    came from elsewhere say nothing of their model but their length, so nothing is overlooked there.
    """
    warnings: list[str] = []
    alias = config.aliases.get(asked.model)
    if alias is not None and alias.model in _models(config, Task.GENERATE) and source.grid_embeds:
        # One alias serves contracts that name a single provider model for both purposes.
        warnings.append(
            f"{param}.model: {asked.model!r} stands for a model that generates; the query is embedded with "
            f"{source.embedding_model!r}, as the data source was"
        )
    else:
        model = served(asked.model, config, Task.EMBED, f"{param}.model")
        if model != stands_for(source.embedding_model, config):
            raise InvalidRequest(
                f"{param}.model: the data source was embedded with {source.embedding_model!r}, not with "
                f"{model!r}; name that model, or fill a data source with the other one",
                param=f"{param}.model",
            )
    # A source without documents may not know its length yet.
    if asked.dimension is None or source.dimension in (0, asked.dimension):
        return warnings
    mismatch = (
        f"{param}.dimension: is {asked.dimension}, but the data source's vectors have {source.dimension}"
    )
    if alias is None or not alias.ignore_dimension or not source.grid_embeds:
        raise InvalidRequest(f"{mismatch}; give that, or leave it out", param=f"{param}.dimension")
    return [*warnings, f"{mismatch}; ignored, as the alias {asked.model!r} asks for"]


def _models(config: Config, task: Task) -> list[str]:
    return [model.name for model in config.models if (model.engine == "embedding") == (task is Task.EMBED)]
