-- written by localgen (format 3)
BEGIN TRANSACTION;
CREATE TABLE drafts (
        session INTEGER NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
        writer TEXT NOT NULL,
        text TEXT NOT NULL,
        PRIMARY KEY (session, writer)
    );
INSERT INTO "drafts" VALUES(1,'2085-e1f0889e','unsent');
CREATE TABLE sessions (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL,
        model TEXT,
        system TEXT,
        params TEXT NOT NULL,
        ctx INTEGER,
        revision INTEGER NOT NULL DEFAULT 0,
        changed_s REAL NOT NULL,
        deleted_s REAL
    , server TEXT NOT NULL DEFAULT '', forked_from INTEGER);
INSERT INTO "sessions" VALUES(1,'sums','tiny','Be short.','{"temperature":0.5,"top_k":null,"top_p":null,"min_p":null,"typical_p":null,"top_n_sigma":null,"xtc_probability":null,"xtc_threshold":null,"dynatemp_range":null,"dynatemp_exponent":null,"adaptive_target":null,"adaptive_decay":null,"mirostat":null,"mirostat_tau":null,"mirostat_eta":null,"repeat_penalty":null,"repeat_last_n":null,"presence_penalty":null,"frequency_penalty":null,"dry_multiplier":null,"dry_base":null,"dry_allowed_length":null,"dry_penalty_last_n":null,"dry_sequence_breakers":null,"logit_bias":{},"seed":null,"logprobs":null,"max_tokens":null,"min_tokens":0,"thinking_budget":null,"stop":[],"stop_token_ids":[],"ignore_eos":false,"json_schema":null,"regex":null,"grammar":null,"infill_sampler":false}',1024,0,1764000000.0,NULL,'',NULL);
INSERT INTO "sessions" VALUES(2,'fork','tiny',NULL,'{"temperature":null,"top_k":null,"top_p":null,"min_p":null,"typical_p":null,"top_n_sigma":null,"xtc_probability":null,"xtc_threshold":null,"dynatemp_range":null,"dynatemp_exponent":null,"adaptive_target":null,"adaptive_decay":null,"mirostat":null,"mirostat_tau":null,"mirostat_eta":null,"repeat_penalty":null,"repeat_last_n":null,"presence_penalty":null,"frequency_penalty":null,"dry_multiplier":null,"dry_base":null,"dry_allowed_length":null,"dry_penalty_last_n":null,"dry_sequence_breakers":null,"logit_bias":{},"seed":null,"logprobs":null,"max_tokens":null,"min_tokens":0,"thinking_budget":null,"stop":[],"stop_token_ids":[],"ignore_eos":false,"json_schema":null,"regex":null,"grammar":null,"infill_sampler":false}',NULL,1,1764000000.0,NULL,'',1);
CREATE TABLE turns (
        session INTEGER NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        prompt TEXT NOT NULL,
        answer TEXT NOT NULL,
        reasoning TEXT NOT NULL,
        stopped INTEGER NOT NULL,
        served TEXT NOT NULL,
        writer TEXT,
        PRIMARY KEY (session, place)
    );
INSERT INTO "turns" VALUES(1,0,'What is 17 + 25?','It is 42.','17 + 25 = 42',0,'tiny · 3 tokens',NULL);
INSERT INTO "turns" VALUES(1,1,'né 漢
more','half','',1,'',NULL);
INSERT INTO "turns" VALUES(2,0,'What is 17 + 25?','It is 42.','17 + 25 = 42',0,'tiny · 3 tokens',NULL);
INSERT INTO "turns" VALUES(2,1,'cut by a crash','so far','',1,'','2085-e1f0889e');
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('sessions',2);
COMMIT;
PRAGMA application_id = 1818714984;
PRAGMA user_version = 3;
