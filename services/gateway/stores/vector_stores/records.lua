-- A tenant's vector stores: what is kept of them and of the files in them. One call is one atomic
-- step: what is written depends on what is there, and counts change with what they count.
--
-- Records (JSON) are made by gateways alone, and compared here whole: `change` and `change_file` write
-- only where nobody else has written since the record was read.
--
-- Keys, all below KEYS[1] (one hash slot):
--   :stores             hash  store -> record
--   :store:<id>         hash  file -> record (of it here: state, attachment, bytes, batch)
--   :store:<id>:unready set   files that searches do not find, yet or ever
--   :store:<id>:facts   hash  in_progress, completed, failed, cancelled: files in that state;
--                             attributes: the bytes of all files' attributes;
--                             <batch>:<state>: what became of a batch's; bytes: of the completed;
--                             active: s; days: it expires so long after that; revision: the last;
--                             reindex:embedder, :token, :state, :why, :until (s): of the last time that
--                             its files were to be embedded anew
--   :store:<id>:embedders hash <embedder> -> how many completed files it embedded ('?': not known);
--                             -<embedder> -> how many of these it could not, of other embedders'
--   :store:<id>:batches hash  batch -> record
--
-- ARGV: op, then
--   create       store, record, days ('' never), most (stores)  -> ok | full
--   change       store, before, after, days  -> ok | gone | expired | changed
--   show         store...                    -> (record or false, facts: also whether it expired)*
--   search       most, embedders (JSON: by the model's name, '' the installation's), store...: they
--                are used
--                                            -> (ok | gone | expired for each), how many files are
--                                               unready in all, of so many the records,
--                                               what those say of their caches,
--                                               which are to be embedded anew by its embedder, the models' names
--   room         most (files in all stores), how many more  -> ok | full
--   put          store, most (as above), attributes (bytes at most in all stores), batch (''), its
--                record, (file, record)*     -> ok | gone | expired | full | attributes
--   change_file  store, file, before, after, attributes (as above)
--                                            -> ok | changed | attributes: these grew beyond that
--   revise       store, file, attachment ('' it is not there)  -> a revision above all before, or 0:
--                                               the file is there by another attachment
--   drop         store, file, attachment     -> whether it was there by that attachment
--   cancel       store, batch, its record: unless it has ended
--   begin        store, embedder, token, for (s), asked for ('' or 1): its files are to be embedded
--                anew, and whose token it is has so long to say more  -> ok | no | gone | expired
--   hold         store, token, why, for (s): it goes on, or waits  -> whether it is still the token's
--   ended        store, token, state, why, for (s): it is not begun by itself before
--   stop         store, embedder: where files are left, it is neither gone on with nor begun by itself
--                                            -> ok | gone | expired
--   clear        store: its files, if it expired  -> the files
--   delete       store                       -> whether it was there, the files

local root, op = KEYS[1], ARGV[1]
local call = redis.call
local time = call('TIME')
local now = tonumber(time[1])
local STORES = root .. ':stores'
local STATES = {'in_progress', 'completed', 'failed', 'cancelled'}
local KEPT = {active = true, days = true, revision = true} -- of a store that expired
local DAY = 86400
local LOOKED_AT = 64 -- files of a store that may be told, in each search
local BATCHES = 100 -- of one store; of more the oldest are forgotten

local function whole(x) return string.format('%.0f', x) end
local function key(store, part) return root .. ':store:' .. store .. (part and ':' .. part or '') end
local function is_there(store) return call('HEXISTS', STORES, store) == 1 end

local function expired(store)
  local told = call('HMGET', key(store, 'facts'), 'active', 'days')
  return told[2] and now >= tonumber(told[1]) + tonumber(told[2]) * DAY
end

-- Of a store that may be changed.
local function refused(store)
  return not is_there(store) and 'gone' or expired(store) and 'expired' or nil
end

local function set_days(store, days)
  if days == '' then call('HDEL', key(store, 'facts'), 'days')
  else call('HSET', key(store, 'facts'), 'days', days) end
end

local function use(store) call('HSET', key(store, 'facts'), 'active', now) end

local function add(store, field, n) call('HINCRBY', key(store, 'facts'), field, n) end

local function set(value) return value and value ~= '' and value ~= cjson.null end

local function add_embedder(store, field, n)
  local embedders = key(store, 'embedders')
  if call('HINCRBY', embedders, field, n) == 0 then call('HDEL', embedders, field) end
end

local function attribute_bytes(file)
  local told = file and file.attributes
  return set(told) and next(told) and #cjson.encode(told) or 0
end

local function count(store, file, n)
  add(store, file.state, n)
  local bytes = attribute_bytes(file)
  add(store, 'attributes', bytes > 0 and n * bytes or 0) -- of none, -0 is no number to Redis
  if file.state ~= 'completed' then return end
  add(store, 'bytes', n * file.bytes)
  add_embedder(store, set(file.embedder) and file.embedder or '?', n)
  if set(file.refused_by) then add_embedder(store, '-' .. file.refused_by, n) end
end

local function embedded(store)
  local total, told = 0, call('HGETALL', key(store, 'embedders'))
  for n = 1, #told, 2 do
    if string.sub(told[n], 1, 1) ~= '-' then total = total + told[n + 1] end
  end
  return total
end

-- Counts that a version without them left behind, or whose files it changed, are made anew.
local function counted(store)
  local facts, total = key(store, 'facts'), 0
  local states = call('HMGET', facts, unpack(STATES))
  for n = 1, #STATES do states[n] = tonumber(states[n] or 0); total = total + states[n] end
  local unready = call('SCARD', key(store, 'unready'))
  if total == call('HLEN', key(store)) and total - states[2] == unready
    and states[2] == embedded(store)
    and (total == 0 or call('HEXISTS', facts, 'attributes') == 1) then return end
  call('HDEL', facts, 'bytes', 'attributes', unpack(STATES))
  call('DEL', key(store, 'embedders'))
  for _, record in ipairs(call('HVALS', key(store))) do count(store, cjson.decode(record), 1) end
end

local function batched(file) return (file.batch or '') ~= '' end

-- What becomes of a file: `before` and `after`, its records; nil where there is none.
local function moved(store, id, before, after)
  local same = before and after and before.attachment == after.attachment
  if before then
    count(store, before, -1)
    if batched(before) and before.state == 'in_progress' then
      add(store, before.batch .. ':in_progress', -1)
      add(store, before.batch .. ':' .. (same and after.state or 'cancelled'), 1)
    end
  end
  if after then
    count(store, after, 1)
    if batched(after) and not same then add(store, after.batch .. ':' .. after.state, 1) end
  end
  local ready = not after or after.state == 'completed'
  call(ready and 'SREM' or 'SADD', key(store, 'unready'), id)
end

local function file_of(store, id)
  local stored = call('HGET', key(store), id)
  return stored and cjson.decode(stored) or nil, stored
end

local function emptied(store)
  local files = call('HVALS', key(store))
  call('DEL', key(store), key(store, 'unready'), key(store, 'batches'), key(store, 'embedders'))
  return files
end

local function add_batch(store, batch, record)
  local batches = key(store, 'batches')
  call('HSET', batches, batch, record)
  if call('HLEN', batches) <= BATCHES then return end
  local ids = call('HKEYS', batches)
  table.sort(ids)
  call('HDEL', batches, ids[1])
  for _, state in ipairs(STATES) do call('HDEL', key(store, 'facts'), ids[1] .. ':' .. state) end
end

local ops = {}

function ops.create(store, record, days, most)
  if call('HLEN', STORES) >= tonumber(most) then return 'full' end
  call('HSET', STORES, store, record)
  use(store)
  set_days(store, days)
  return 'ok'
end

function ops.change(store, before, after, days)
  local no = refused(store)
  if no then return no end
  if call('HGET', STORES, store) ~= before then return 'changed' end
  call('HSET', STORES, store, after)
  set_days(store, days)
  use(store)
  return 'ok'
end

function ops.show(...)
  local told = {}
  for _, store in ipairs({...}) do
    local record = call('HGET', STORES, store)
    local facts = {}
    if record then
      counted(store)
      facts = call('HGETALL', key(store, 'facts'))
      if expired(store) then table.insert(facts, 'expired'); table.insert(facts, '1') end
      local embedders = call('HGETALL', key(store, 'embedders'))
      for n = 1, #embedders, 2 do
        table.insert(facts, 'by:' .. embedders[n])
        table.insert(facts, embedders[n + 1])
      end
    end
    table.insert(told, record)
    table.insert(told, facts)
  end
  return told
end

-- Whether files are found by words alone that the embedder could embed.
local function has_due(store, embedder)
  local files = tonumber(call('HGET', key(store, 'facts'), 'completed') or 0)
  local done = call('HMGET', key(store, 'embedders'), embedder, '-' .. embedder)
  return files > (done[1] or 0) + (done[2] or 0)
end

-- Likewise, and nobody is at them or has said that it is not to be.
local function is_due(store, embedder, asked)
  if not has_due(store, embedder) then return false end
  local last = call('HMGET', key(store, 'facts'), 'reindex:embedder', 'reindex:state', 'reindex:until')
  if last[1] ~= embedder then return true end
  if last[2] == 'in_progress' then return now >= tonumber(last[3]) end
  return asked or last[2] ~= 'cancelled' and now >= tonumber(last[3])
end

-- A full Redis takes no writes, and searches go on.
local function used(store) redis.pcall('HSET', key(store, 'facts'), 'active', now) end

function ops.search(most, embedders, ...)
  local states, found, total, caches, due, models = {}, {}, 0, {}, {}, {}
  embedders = cjson.decode(embedders)
  for _, store in ipairs({...}) do
    local no = refused(store)
    local record = call('HGET', STORES, store)
    local model = ''
    if record and string.find(record, '"embedding_model":"[^"]') then
      model = cjson.decode(record).embedding_model
    end
    table.insert(states, no or 'ok')
    table.insert(models, model)
    if not no then
      used(store)
      local embedder = embedders[model] or ''
      if embedder ~= '' and is_due(store, embedder) then table.insert(due, store) end
    end
    if record and string.find(record, '"cache":{', 1, true) then
      table.insert(caches, cjson.encode(cjson.decode(record).cache))
    end
    local unready = key(store, 'unready')
    local files = call('SCARD', unready)
    total = total + files
    if #found < tonumber(most) then
      local ids = files > LOOKED_AT and call('SRANDMEMBER', unready, LOOKED_AT)
        or call('SMEMBERS', unready)
      table.sort(ids)
      for _, id in ipairs(ids) do
        if #found >= tonumber(most) then break end
        table.insert(found, call('HGET', key(store), id) or nil)
      end
    end
  end
  return {states, total, found, caches, due, models}
end

-- A file in several stores counts in each.
local function is_full(most, more)
  for _, store in ipairs(call('HKEYS', STORES)) do more = more + call('HLEN', key(store)) end
  return more > tonumber(most)
end

local function too_long(most, more)
  if more <= 0 then return false end
  for _, store in ipairs(call('HKEYS', STORES)) do
    more = more + (call('HGET', key(store, 'facts'), 'attributes') or 0)
  end
  return more > tonumber(most)
end

function ops.room(most, more) return is_full(most, tonumber(more)) and 'full' or 'ok' end

function ops.put(store, most, attributes, batch, record, ...)
  local no = refused(store)
  if no then return no end
  local files, more, bytes = {...}, 0, 0
  for n = 1, #files, 2 do
    more = more + 1 - call('HEXISTS', key(store), files[n])
    bytes = bytes + attribute_bytes(cjson.decode(files[n + 1]))
      - attribute_bytes(file_of(store, files[n]))
  end
  if more > 0 and is_full(most, more) then return 'full' end
  counted(store)
  if too_long(attributes, bytes) then return 'attributes' end
  if batch ~= '' then add_batch(store, batch, record) end
  for n = 1, #files, 2 do
    moved(store, files[n], file_of(store, files[n]), cjson.decode(files[n + 1]))
    call('HSET', key(store), files[n], files[n + 1])
  end
  use(store)
  return 'ok'
end

function ops.change_file(store, id, before, after, attributes)
  local file, stored = file_of(store, id)
  if stored ~= before then return 'changed' end
  counted(store)
  local new = cjson.decode(after)
  if too_long(attributes, attribute_bytes(new) - attribute_bytes(file)) then
    return 'attributes'
  end
  moved(store, id, file, new)
  call('HSET', key(store), id, after)
  return 'ok'
end

function ops.revise(store, id, attachment)
  local file = file_of(store, id)
  if (file and file.attachment or '') ~= attachment then return 0 end
  local facts = key(store, 'facts')
  local last = tonumber(call('HGET', facts, 'revision') or 0)
  local revision = math.max(last + 1, now * 1e6 + tonumber(time[2]))
  local told = string.format('%.0f', revision)
  if is_there(store) then call('HSET', facts, 'revision', told) end
  return told
end

function ops.drop(store, id, attachment)
  local file = file_of(store, id)
  if not file or file.attachment ~= attachment then return 0 end
  counted(store)
  moved(store, id, file, nil)
  return call('HDEL', key(store), id)
end

function ops.cancel(store, batch, record)
  local batches = key(store, 'batches')
  local left = tonumber(call('HGET', key(store, 'facts'), batch .. ':in_progress') or 0)
  if left > 0 and call('HEXISTS', batches, batch) == 1 then call('HSET', batches, batch, record) end
end

local function note(store, token, state, why, lasts)
  call('HSET', key(store, 'facts'), 'reindex:token', token, 'reindex:state', state,
    'reindex:why', why, 'reindex:until', whole(now + tonumber(lasts)))
end

local function is_tokens(store, token)
  return is_there(store) and call('HGET', key(store, 'facts'), 'reindex:token') == token
end

function ops.begin(store, embedder, token, lasts, asked)
  local no = refused(store)
  if no then return no end
  counted(store)
  if not is_due(store, embedder, asked ~= '') then return 'no' end
  call('HSET', key(store, 'facts'), 'reindex:embedder', embedder)
  note(store, token, 'in_progress', '', lasts)
  return 'ok'
end

function ops.hold(store, token, why, lasts)
  if not is_tokens(store, token) or expired(store) then return 0 end
  note(store, token, 'in_progress', why, lasts)
  return 1
end

function ops.ended(store, token, state, why, lasts)
  if is_tokens(store, token) then note(store, '', state, why, lasts) end
end

function ops.stop(store, embedder)
  local no = refused(store)
  if no then return no end
  counted(store)
  if has_due(store, embedder) then
    call('HSET', key(store, 'facts'), 'reindex:embedder', embedder)
    note(store, '', 'cancelled', '', 0)
  end
  return 'ok'
end

function ops.clear(store)
  if not is_there(store) or not expired(store) then return {} end
  local facts, files = key(store, 'facts'), emptied(store)
  for _, field in ipairs(call('HKEYS', facts)) do
    if not KEPT[field] then call('HDEL', facts, field) end
  end
  return files
end

function ops.delete(store)
  local was_there = call('HDEL', STORES, store)
  local files = emptied(store)
  call('DEL', key(store, 'facts'))
  return {was_there, files}
end

return ops[op](unpack(ARGV, 2))
