"""Renders the chart with Helm itself and validates what comes against Kubernetes' schemas.

Run by the Python that has Helm: standard input brings {"chart", "kubernetes", "cases": [values]}; standard output gets,
for each case, {"documents": [...], "faults": [...]} or {"refused": "why"}.
"""

import json
import sys

import kubernetes_validate
import yaml
from helm_python.chart import Chart, lint


def main() -> None:
    asked = json.load(sys.stdin)
    found = []
    with Chart.load(asked["chart"]) as chart:
        for values in asked["cases"]:
            try:
                rendered = chart.render(values=values, name="demo", namespace="llm")
            except Exception as error:
                found.append({"refused": str(error)})
                continue
            texts = [text for path, text in rendered.items() if not path.endswith("NOTES.txt")]
            documents = [document for text in texts for document in yaml.safe_load_all(text) if document]
            faults = [fault for document in documents for fault in faults_of(document, asked["kubernetes"])]
            faults += lint(asked["chart"], values=values)["errors"]
            found.append({"documents": documents, "faults": faults})
    json.dump(found, sys.stdout)


def faults_of(document: dict, version: str) -> list[str]:
    """Custom resources have no schema here."""
    if "monitoring.coreos.com" in document["apiVersion"]:
        return []
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except Exception as error:
        return [f"{document['kind']} {document['metadata']['name']}: {error}"]
    return []


if __name__ == "__main__":
    main()
