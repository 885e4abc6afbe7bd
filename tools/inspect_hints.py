"""Shows what is in a folder of hint files, and whether it is intact.

Example:
    python tools/inspect_hints.py out/hints --verify
    python tools/inspect_hints.py out/hints --sample step-3/item-1/sample-0 --layer 3 --site k

Reads only, also while a rollout writes. Exit status: 0 intact, 1 damaged, 2 bad request.
A vocabulary is a JSON list of texts by token id, an object of ids by text, or a tokenizer.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_trace.formats import unpack_hint
from megatron_trace.hints import (
    RecordKind,
    RolloutSample,
    Site,
    SiteHint,
    decode_residues,
)
from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.findings import Finding, FindingKind
from megatron_trace.hints.sample_file import SampleFile

# Something that was or may have been committed cannot be read.
DAMAGE = (FindingKind.DAMAGED, FindingKind.MISSING, FindingKind.ORPHAN, FindingKind.TORN)
_SECONDS_OF_A_COMMIT = 1.0
_SAMPLES_SHOWN = 20


def main(arguments: list[str] | None = None) -> int:
    """Shows a folder or one of its samples; gives the exit status."""
    options = parse_arguments(arguments)
    if not Path(options.folder).is_dir():
        print(f"{options.folder} is not a folder of hint files", file=sys.stderr)
        return 2
    try:
        files = open_settled(options.folder)
        if options.sample is None:
            report = describe_folder(files, verify=options.verify)
            show = show_folder
        else:
            text_of = (lambda _: None) if options.vocab is None else load_vocabulary(options.vocab)
            place = options.layer, options.site
            report = describe_sample(files, options.sample, place, options.kind, text_of)
            show = show_sample
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"DAMAGED: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report, options)
    return int(report.get("damaged", False))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Gives the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="folder of hint files")
    parser.add_argument("--verify", action="store_true", help="read everything, compare checksums")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--all", action="store_true", help="list all samples, not the first 20")
    one = parser.add_argument_group("one sample: codes beside text")
    one.add_argument("--sample", metavar="ID", help="show this sample")
    one.add_argument("--layer", type=int, help="decoder layer (default: its first)")
    one.add_argument("--site", type=Site, choices=list(Site), help="site (default: its first)")
    one.add_argument(
        "--kind",
        type=RecordKind,
        choices=list(RecordKind),
        default=RecordKind.HINT,
        help="hints or full codes (default hint)",
    )
    one.add_argument("--blocks", type=int, default=2, help="blocks shown of a row (default 2)")
    one.add_argument("--vocab", metavar="FILE", help="vocabulary, to show text")
    return parser.parse_args(arguments)


def open_settled(folder: str) -> HintFiles:
    """Opens a folder, again after a moment if a commit may just be going on."""
    files = HintFiles(folder)
    if any(finding.may_be_in_progress for finding in files.findings):
        time.sleep(_SECONDS_OF_A_COMMIT)
        files = HintFiles(folder)
    return files


def describe_folder(files: HintFiles, *, verify: bool) -> dict[str, Any]:
    """Gives samples, versions, places and findings as JSON can hold them."""
    findings = list(files.findings)
    samples, versions, places = [], {}, {}
    for sample_id in (*files.sample_ids(), *files.incomplete()):
        try:
            shard_files = files.shard_files(sample_id)
        except (LookupError, ValueError) as error:
            findings.append(_finding_of(files, error))
            continue
        samples.append(_describe_files(shard_files))
        for file in shard_files:
            _count(file, versions, places)
    if verify:
        findings += files.verify()
    findings = list(dict.fromkeys(findings))
    complete = max(len(files.sample_ids()), 1)
    return {
        "folder": str(files.folder),
        "num_samples": len(files.sample_ids()),
        "num_incomplete": len(files.incomplete()),
        "versions": [versions[version] for version in sorted(versions)],
        "places": [
            place | {"coverage": place["samples"] / complete} for _, place in sorted(places.items())
        ],
        "samples": samples,
        "findings": [{"kind": f.kind, "path": str(f.path), "detail": f.detail} for f in findings],
        "verified": verify,
        "bytes_read": files.bytes_read.header_bytes + files.bytes_read.tensor_bytes,
        "damaged": any(finding.kind in DAMAGE for finding in findings),
    }


def describe_sample(
    files: HintFiles,
    sample_id: str,
    wanted: tuple[int | None, Site | None],
    kind: RecordKind,
    text_of: Callable[[int], str | None],
) -> dict[str, Any]:
    """Gives a sample, its records, and the rows of one of them, as JSON can hold them.

    Raises:
        LookupError: There is no such sample or record.
        ValueError: What is asked for is damaged.
    """
    sample, shard_files = files.sample(sample_id), files.shard_files(sample_id)
    record = _find_record(shard_files, sample_id, wanted, kind)
    shown = None
    if record is not None:
        shown = {"kind": kind, "layer": record.key.layer, "site": record.key.site}
        shown |= {"num_bits": record.num_bits, "global_scale": record.global_scale}
        shown |= {"scale_form": record.scale_form, "number_format": record.number_format}
    return _describe_files(shard_files) | {
        "num_prompt_tokens": len(sample.prompt_tokens),
        "num_response_tokens": len(sample.response_tokens),
        "finish_reason": sample.finish_reason,
        "routing_shape": list(sample.routing.shape),
        "records": [
            {"kind": of_kind, "layer": place[0], "site": place[1]}
            | {
                name: {"shape": list(entry.shape), "crc32": f"{entry.crc32:08x}"}
                for name, entry in file.entries(of_kind, place).items()
            }
            for file in shard_files
            for of_kind in RecordKind
            for place in file.places(of_kind)
        ],
        "shown": shown,
        "rows": _rows(sample, record, text_of),
    }


def show_folder(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Prints a folder as tables."""
    print(
        f"{report['folder']}: {report['num_samples']} samples, "
        f"{report['num_incomplete']} more without some shard"
    )
    print(
        f"\n{'version':>8} {'samples':>8} {'rows':>9} {'file bytes':>13} {'hint bytes/row':>15}  "
        "settings"
    )
    for version in report["versions"]:
        per_row = version["hint_bytes"] / max(version["rows"], 1)
        print(
            f"{version['policy_version']:8} {version['samples']:8} {version['rows']:9} "
            f"{version['file_bytes']:13} {per_row:15.1f}  {', '.join(version['settings_digests'])}"
        )
    print(f"\n{'kind':6} {'layer':>5} {'site':5} {'samples':>8} {'coverage':>9} {'bytes':>13}")
    for place in report["places"]:
        print(
            f"{place['kind']:6} {place['layer']:5} {place['site']:5} {place['samples']:8} "
            f"{place['coverage']:9.1%} {place['bytes']:13}"
        )
    print(f"\n{'checksum':8} {'version':>8} {'rows':>6} {'bytes':>11} {'shards':8} sample")
    shown = report["samples"] if options.all else report["samples"][:_SAMPLES_SHOWN]
    for sample in shown:
        for file in sample["files"]:
            print(
                f"{file['header_crc32']} {sample['policy_version']:8} {sample['num_rows']:6} "
                f"{file['file_bytes']:11} {file['shard']:8} {sample['sample_id']}"
            )
    if len(shown) < len(report["samples"]):
        print(f"... and {len(report['samples']) - len(shown)} more (--all)")
    for finding in report["findings"]:
        print(f"\n{finding['kind']}: {finding['path']}: {finding['detail']}")
    checked = "everything read, checksums compared" if report["verified"] else "headers read only"
    print(f"\n{'DAMAGED' if report['damaged'] else 'intact'} ({checked})")


def show_sample(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Prints a sample with the codes of one place beside its tokens."""
    print(
        f"sample {report['sample_id']}: policy version {report['policy_version']}, settings "
        f"{report['settings_digest'] or '(none)'}, {report['num_prompt_tokens']} prompt and "
        f"{report['num_response_tokens']} response tokens, finished by {report['finish_reason']}"
    )
    for record in report["records"]:
        tensors = ", ".join(
            f"{name} {value['shape']} {value['crc32']}"
            for name, value in record.items()
            if isinstance(value, dict)
        )
        print(f"  {record['kind']:6} layer {record['layer']} {record['site']}: {tensors}")
    shown = report["shown"]
    if shown is not None:
        scale = shown["global_scale"]
        print(
            f"\nlayer {shown['layer']}, {shown['site']}, {shown['kind']}: "
            f"{shown['number_format']}, {shown['num_bits']} bit, "
            f"{'no global scale' if scale is None else f'global scale {scale:.6g}'}; "
            f"{'scale byte' if shown['scale_form'] == 'raw' else 'residue of scale byte'}:values, "
            f"{options.blocks} blocks"
        )
    versions = {row[name] for row in report["rows"] for name in ("version", "sampled_by")} - {None}
    if len(versions) > 1:
        print(
            "\nseveral policy versions: @ is the one that computed the row, < the one that sampled "
            "the token"
        )
    for row in report["rows"]:
        text = "" if row["text"] is None else repr(row["text"])
        logprob = "" if row["logprob"] is None else f"{row['logprob']:.3f}"
        blocks = [
            f"{scale}:{values}"
            for scale, values in zip(row.get("scale_bytes", []), row.get("values", []), strict=True)
        ]
        made = "".join(
            f"{mark}{'' if row[name] is None else row[name]}".rjust(6)
            for mark, name in (("@", "version"), ("<", "sampled_by"))
        )
        print(
            f"{row['position']:6} {row['token']:7} {text:12.12} {logprob:>8}"
            f"{made if len(versions) > 1 else ''}  {' '.join(blocks[: options.blocks])}".rstrip()
        )


def load_vocabulary(path: str) -> Callable[[int], str]:
    """Gives the function from token id to text that a vocabulary file says.

    Raises:
        LookupError: There is no such file, or it is not a vocabulary.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LookupError(f"{path} is not a vocabulary: {error}") from error
    if isinstance(content, dict):
        ids = content.get("model", {}).get("vocab", content) if "model" in content else content
        texts = {index: text for text, index in ids.items()}
    elif isinstance(content, list):
        texts = dict(enumerate(content))
    else:
        raise LookupError(f"{path} is not a vocabulary: neither a list nor an object")
    return lambda token: texts.get(token, "\N{REPLACEMENT CHARACTER}")


def _describe_files(shard_files: tuple[SampleFile, ...]) -> dict[str, Any]:
    first = shard_files[0]
    return {
        "sample_id": first.sample_id,
        "policy_version": first.policy_version,
        "settings_digest": first.settings_digest,
        "num_rows": first.num_rows,
        "files": [
            {
                "shard": str(file.shard),
                "path": str(file.path),
                "file_bytes": file.num_bytes,
                "header_crc32": f"{file.header_crc32:08x}",
            }
            for file in shard_files
        ],
    }


def _count(file: SampleFile, versions: dict[int, Any], places: dict[Any, Any]) -> None:
    empty = {"samples": 0, "rows": 0, "file_bytes": 0, "hint_bytes": 0, "settings_digests": []}
    version = versions.setdefault(
        file.policy_version, {"policy_version": file.policy_version} | empty
    )
    version["file_bytes"] += file.num_bytes
    if file.settings_digest not in version["settings_digests"]:
        version["settings_digests"] = [*version["settings_digests"], file.settings_digest]
    for kind in RecordKind:
        for layer, site in file.places(kind):
            num_bytes = sum(e.num_bytes for e in file.entries(kind, (layer, site)).values())
            if kind is RecordKind.HINT:
                version["hint_bytes"] += num_bytes
            place = places.setdefault(
                (kind, layer, site),
                {"kind": kind, "layer": layer, "site": site, "samples": 0, "bytes": 0},
            )
            place["samples"] += 1
            place["bytes"] += num_bytes
    if file.shard.index == 0:
        version["samples"] += 1
        version["rows"] += file.num_rows


def _find_record(
    shard_files: tuple[SampleFile, ...],
    sample_id: str,
    wanted: tuple[int | None, Site | None],
    kind: RecordKind,
) -> SiteHint | None:
    layer, site = wanted
    for file in shard_files:
        for place in file.places(kind):
            if layer in (None, place[0]) and site in (None, place[1]):
                return file.record(kind, place)
    if layer is None and site is None and kind is RecordKind.HINT:
        return None
    at = f"{'any layer' if layer is None else f'layer {layer}'}, {site or 'any site'}"
    raise LookupError(
        f"sample {sample_id} has no {kind} record at {at}; without --layer, --site and --kind, its "
        "records are listed"
    )


def _rows(
    sample: RolloutSample, record: SiteHint | None, text_of: Callable[[int], str | None]
) -> list[dict[str, Any]]:
    """Gives a row for each token; the last token, which no site has seen, has no values.

    `version` computed the row, its codes, keys and values; `sampled_by` sampled the token.
    """
    of_prompt = [None] * len(sample.prompt_tokens)
    columns = {
        "token": sample.tokens,
        "text": map(text_of, sample.tokens),
        "logprob": of_prompt + sample.logprobs.tolist(),
        "version": [*sample.row_versions.tolist(), None],
        "sampled_by": of_prompt + sample.token_versions.tolist(),
    }
    rows = [
        {"position": position, **dict(zip(columns, row, strict=True))}
        for position, row in enumerate(zip(*columns.values(), strict=True))
    ]
    if record is not None:
        values = unpack_hint(record.payload, record.num_bits).tolist()
        raw = record.scale_form == "raw"
        block_scales = (record.scale_bytes if raw else decode_residues(record)).tolist()
        for row, scales, of_row in zip(rows, block_scales, values, strict=False):
            digits = 2 if record.num_bits == 8 else 1
            text = "".join(f"{value:0{digits}x}" for value in of_row)
            width = len(text) // len(scales)
            row["scale_bytes"] = [f"{scale:02x}" if raw else f"{scale}" for scale in scales]
            row["values"] = [text[start : start + width] for start in range(0, len(text), width)]
    return rows


def _finding_of(files: HintFiles, error: Exception) -> Finding:
    path, _, detail = str(error).partition(": ")
    return Finding(FindingKind.DAMAGED, Path(path) if detail else files.folder, detail or path)


if __name__ == "__main__":
    sys.exit(main())
