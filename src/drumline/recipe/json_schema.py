"""The JSON Schema of a recipe file, for editors and other programs. It also allows the short forms that `load` reads.

An editor that knows Taplo or Even Better TOML takes it by a first line `#:schema recipe.schema.json`.
"""

from typing import Any

from drumline.recipe.sections import Recipe

_AXIS = "(pp|dp|fsdp|cp|tp|ep)[1-9][0-9]{0,9}"


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a recipe file.

    Returns:
        The schema, with `extends`, layout strings and bare paths of sources.
    """
    found = Recipe.model_json_schema()
    found["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    found["title"] = "drumline recipe"
    extends = {"type": "string", "description": "Built-in recipe or file whose values this one starts from."}
    found["properties"] = {"extends": extends, **found["properties"]}
    definitions = found["$defs"]
    layout = {"type": "string", "pattern": rf"^{_AXIS}(\.{_AXIS})*$", "description": "Degrees, such as dp2.fsdp4."}
    definitions["Layout"] = {"anyOf": [layout, definitions["Layout"]]}
    path = {"type": "string", "description": definitions["Source"]["properties"]["path"]["description"]}
    definitions["Source"] = {"anyOf": [path, definitions["Source"]]}
    sources = definitions["Data"]["properties"]["sources"]
    several = {name: sources.pop(name) for name in ("type", "items")}
    sources["anyOf"] = [{"$ref": "#/$defs/Source"}, several]
    for name in ("rope_scaling", "yarn", "moe", "mla"):
        definitions["Model"]["properties"][name]["anyOf"].append({"const": "none"})  # TOML has no null
    return found
