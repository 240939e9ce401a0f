"""The API document for people: one page that needs no script and loads nothing from anywhere. Pure."""

from __future__ import annotations

from typing import Any

import jinja2
from markupsafe import Markup, escape

CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
METHODS = ("get", "head", "post", "put", "delete")
"""In this order under a path."""
REF_PREFIX = "#/components/schemas/"

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }} API {{ version }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1.5rem; }
code, .method, pre { font-family: ui-monospace, monospace; font-size: .9em; }
h2 { border-bottom: 1px solid var(--line); margin-top: 2.5rem; }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .5rem 0; padding: .4rem .8rem; }
details details { background: var(--soft); }
summary { cursor: pointer; }
.method { display: inline-block; font-weight: 700; width: 4.5rem; }
table { border-collapse: collapse; width: 100%; }
td, th { border-top: 1px solid var(--line); padding: .3rem .6rem .3rem 0; }
td, th { text-align: left; vertical-align: top; }
</style>
</head>
<body>
<h1>{{ title }} <small>{{ version }}</small></h1>
{% for part in description.split("\\n\\n") %}<p>{{ part | words }}</p>{% endfor %}
<p>For machines: <a href="openapi.json"><code>openapi.json</code></a></p>
{% for tag, operations in groups %}
<h2>{{ tag }}</h2>
{% for operation in operations %}
<details id="{{ operation.id }}">
<summary><span class="method">{{ operation.method }}</span> <code>{{ operation.path }}</code>
 {{ operation.summary }}</summary>
<p>{{ operation.description | words }}</p>
{% if operation.parameters %}<table>
<tr><th>parameter</th><th>in</th><th></th></tr>
{% for each in operation.parameters %}<tr><td><code>{{ each.name }}</code>
{%- if each.required %} (required){% endif %}</td><td>{{ each.in }}</td>
<td>{{ (each.description or "") | words }}</td></tr>
{% endfor %}</table>{% endif %}
{% if operation.body %}
<p>Body: <a href="#{{ operation.body }}"><code>{{ operation.body }}</code></a></p>{% endif %}
<table>
<tr><th>status</th><th>answer</th><th></th></tr>
{% for each in operation.responses %}<tr><td>{{ each.status }}</td><td>
{%- for kind, name in each.contents %}{% if name %}<a href="#{{ name }}">{{ name }}</a>{% else %}{{ kind }}
{%- endif %} {% endfor -%}
</td><td>{{ each.description | words }}</td></tr>
{% endfor %}</table>
</details>
{% endfor %}{% endfor %}
<h2>Shapes</h2>
{% for name, schema in schemas %}
<details id="{{ name }}"><summary><code>{{ name }}</code></summary>
{% if schema.description %}<p>{{ schema.description | words }}</p>{% endif %}
<table>
{% for field, about in schema.fields %}<tr><td><code>{{ field }}</code>
{%- if about.required %} (required){% endif %}</td><td>{{ about.kind }}
{%- for ref in about.refs %} <a href="#{{ ref }}"><code>{{ ref }}</code></a>{% endfor %}
</td><td>{{ about.description | words }}</td></tr>
{% endfor %}</table></details>
{% endfor %}
</body>
</html>
"""


def _words(text: str) -> Markup:
    """Return text whose parts between backticks are code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part)
        for index, part in enumerate(parts)
    )


_ENVIRONMENT = jinja2.Environment(autoescape=True)
_ENVIRONMENT.filters["words"] = _words
_PAGE = _ENVIRONMENT.from_string(TEMPLATE)


def page(document: dict[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, methods in document["paths"].items():
        for method in METHODS:
            if method in methods:
                operation = methods[method]
                tag = operation.get("tags", ["others"])[0]
                groups.setdefault(tag, []).append(_operation(document, path, method, operation))
    return _PAGE.render(
        title=document["info"]["title"],
        version=document["info"]["version"],
        description=document["info"].get("description", ""),
        groups=list(groups.items()),
        schemas=[
            (name, _schema(schema)) for name, schema in sorted(document["components"]["schemas"].items())
        ],
    )


def _operation(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> dict[str, Any]:
    contents = operation.get("requestBody", {}).get("content", {})
    return {
        "id": operation.get("operationId", f"{method} {path}"),
        "method": method.upper(),
        "path": path,
        "summary": operation.get("summary", ""),
        "description": operation.get("description", ""),
        "parameters": [_resolved(document, each) for each in operation.get("parameters", [])],
        "body": next((ref for content in contents.values() for ref in _refs(content)), ""),
        "responses": [
            {
                "status": status,
                "description": response.get("description", ""),
                "contents": [
                    (kind, next(iter(_refs(content)), ""))
                    for kind, content in response.get("content", {}).items()
                ],
            }
            for status, response in operation["responses"].items()
        ],
    }


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    required = schema.get("required", ())
    return {
        "description": schema.get("description", ""),
        "fields": [
            (
                name,
                {
                    "required": name in required,
                    "kind": _kind(about),
                    "refs": _refs(about),
                    "description": about.get("description", ""),
                },
            )
            for name, about in schema.get("properties", {}).items()
        ],
    }


def _kind(about: dict[str, Any]) -> str:
    """Return a field's type in a few words."""
    if "anyOf" in about:
        return " or ".join(filter(None, dict.fromkeys(_kind(option) for option in about["anyOf"])))
    if "const" in about or "enum" in about:
        return ", ".join(str(value) for value in about.get("enum", [about.get("const")]))
    if about.get("type") == "array":
        return f"list of {_kind(about.get('items', {}))}".removesuffix(" of ")
    bounds = [f"≥ {about['minimum']}"] if "minimum" in about else []
    bounds += [f"≤ {about['maximum']}"] if "maximum" in about else []
    return " ".join([str(about.get("type", "")), *bounds]).strip()


def _refs(node: Any) -> list[str]:
    """Return the schemas that a part of the document names, each once."""
    if isinstance(node, dict):
        own = node.get("$ref")
        found = [own.removeprefix(REF_PREFIX)] if isinstance(own, str) else []
        return list(dict.fromkeys([*found, *(ref for value in node.values() for ref in _refs(value))]))
    return [ref for value in node for ref in _refs(value)] if isinstance(node, list) else []


def _resolved(document: dict[str, Any], parameter: dict[str, Any]) -> dict[str, Any]:
    reference = parameter.get("$ref")
    if reference is None:
        return parameter
    found: dict[str, Any] = document["components"]["parameters"][reference.rsplit("/", 1)[-1]]
    return found
